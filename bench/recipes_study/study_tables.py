"""What the study says: tables of its runs, in text and as docs/performance_tables.py reads them."""

from statistics import mean

from recipe_rows import REFERENCE, ROWS

HEADS = ["", "held-out loss", "off bf16's", "in %", "of its seeds, in %", "runs"]


def seed_noise(runs: dict) -> float:
    """The range over the reference's seeds, in % of their mean; NaN of fewer than two."""
    losses = [run["loss"] for run in runs.get(REFERENCE, {}).values()]
    return 100 * (max(losses) - min(losses)) / mean(losses) if len(losses) > 1 else float("nan")


def differences(runs: dict, row: str) -> list[float]:
    """Each seed's loss less the reference's of that seed, in % of it."""
    references = runs.get(REFERENCE, {})
    shared = sorted(set(runs[row]) & set(references), key=int)
    return [100 * (runs[row][seed]["loss"] / references[seed]["loss"] - 1) for seed in shared]


def cells(runs: dict) -> list[list[str]]:
    """A row of HEADS for each that has run, in the order of ROWS."""
    table = []
    for name in (name for name in ROWS if runs.get(name)):
        losses = [run["loss"] for run in runs[name].values()]
        line = [ROWS[name].title, f"{mean(losses):.4f}"]
        of_seeds = differences(runs, name)
        if name == REFERENCE or not of_seeds:
            line += ["", "", ""]
        else:
            off = mean(runs[name][seed]["loss"] - runs[REFERENCE][seed]["loss"]
                       for seed in set(runs[name]) & set(runs[REFERENCE]))
            line += [f"{off:+.4f}", f"{mean(of_seeds):+.2f}", f"{min(of_seeds):+.2f} to {max(of_seeds):+.2f}"]
        table.append([*line, str(len(losses))])
    return table


def steps_of_curve(runs: dict) -> list[int]:
    """Some steps after which all runs were evaluated."""
    run = next(run for seeds in runs.values() for run in seeds.values())
    return sorted(map(int, run["losses"]))[4::5]


def curve(runs: dict) -> list[list[str]]:
    """Differences in % after those steps, means over seeds that both have."""
    table = []
    for name in (name for name in ROWS if runs.get(name) and name != REFERENCE):
        shared = set(runs[name]) & set(runs.get(REFERENCE, {}))
        if shared:
            both = [(runs[name][seed]["losses"], runs[REFERENCE][seed]["losses"]) for seed in shared]
            off = [
                mean(100 * (mine[str(step)] / theirs[str(step)] - 1) for mine, theirs in both)
                for step in steps_of_curve(runs)
            ]
            table.append([ROWS[name].title, *(f"{percent:+.2f}" for percent in off)])
    return table
