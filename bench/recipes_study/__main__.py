"""What the recipes do to a small Llama's held-out loss: python bench/recipes_study [--rows ROW …]

Trains each row (recipe_rows.py) with each seed, several runs side by side on one GPU, and compares the losses of a
row with bf16's of the same seeds, which have the same first weights and the same text. What seeds alone do is the
range over bf16's five. Every recipe is emulated, so any GPU will do. Results are written after each run: a run that
is stopped, by hand or by --seconds, leaves what it has, and --go-on runs what is missing.
"""

import argparse
import json
import queue
import time
from pathlib import Path

import torch
import torch.multiprocessing as mp
from recipe_rows import REFERENCE, REFERENCE_SEEDS, ROWS, SEEDS
from study_tables import HEADS, cells, curve, seed_noise, steps_of_curve
from tabulate import tabulate
from train_row import TINY, Sizes
from study_workers import work


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--seeds", type=int, help=f"of each row; default {SEEDS}, and {REFERENCE_SEEDS} of bf16")
    parser.add_argument("--seconds", type=float, default=550, help="begin no run that would not end in this time")
    parser.add_argument("--workers", type=int, default=6, help="processes that train side by side")
    parser.add_argument("--steps", type=int, help=f"default {Sizes.steps}")
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a smaller model, to try the script")
    parser.add_argument("--json", type=Path, default=Path("recipes_study.json"), help="where the results go")
    parser.add_argument("--go-on", action="store_true", help="keep the runs that the file has")
    return parser.parse_args()


def jobs_of(args, done: dict) -> list[tuple[str, int]]:
    """(row, seed), a seed of all rows after the other."""
    seeds = {name: args.seeds or (REFERENCE_SEEDS if name == REFERENCE else SEEDS) for name in args.rows}
    jobs = [(name, seed) for seed in range(max(seeds.values())) for name in args.rows if seed < seeds[name]]
    return [(name, seed) for name, seed in jobs if str(seed) not in done.get(name, {})]


def write(args, sizes, runs, failed, seconds):
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    where = {"device": device, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
             "workers": args.workers, "seconds": round(seconds)}
    data = {"environment": where, "sizes": vars(sizes), "runs": runs, "failed": failed}
    part = args.json.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1))
    part.replace(args.json)


def show(runs, failed):
    if not runs:
        return print("nothing ran", *failed, sep="\n")
    print("\n" + tabulate(cells(runs), HEADS, "pipe", disable_numparse=True))
    print(f"\nrange over bf16's seeds: {seed_noise(runs):.2f} %")
    if table := curve(runs):
        heads = ["off bf16's, in %, after steps", *steps_of_curve(runs)]
        print("\n" + tabulate(table, heads, "pipe", disable_numparse=True))
    for line in failed:
        print("FAILED", line)


def main():
    args = parse_arguments()
    sizes = TINY if args.tiny else Sizes()
    if args.steps:
        sizes = Sizes(**vars(sizes) | {"steps": args.steps})
    args.json.parent.mkdir(parents=True, exist_ok=True)
    runs = json.loads(args.json.read_text())["runs"] if args.go_on and args.json.exists() else {}
    started, context = time.time(), mp.get_context("spawn")
    jobs, results, failed = context.Queue(), context.Queue(), []
    todo = jobs_of(args, runs)
    for job in todo:
        jobs.put(job)
    workers = [
        context.Process(target=work, args=(jobs, results, args, sizes, started + args.seconds), daemon=True)
        for _ in range(min(args.workers, len(todo)))
    ]
    for worker in workers:
        worker.start()
    at_work = len(workers)
    while at_work:
        try:
            got = results.get(timeout=10)
        except queue.Empty:
            if not any(worker.is_alive() for worker in workers):
                failed.append("a process ended before its run did")
                break
            continue
        if got is None:
            at_work -= 1
            continue
        name, seed, outcome = got
        if isinstance(outcome, dict):
            # As it is read back: the keys of JSON are strings.
            runs.setdefault(name, {})[str(seed)] = json.loads(json.dumps(outcome))
            said = f"loss {outcome['loss']:.4f}, {outcome['seconds']:.0f} s{'' if outcome['graph'] else ', no graph'}"
        else:
            failed.append(f"{name}, seed {seed}: {outcome}")
            said = outcome
        print(f"{time.time() - started:5.0f} s  {name}, seed {seed}: {said}", flush=True)
        write(args, sizes, runs, failed, time.time() - started)
    show(runs, failed)


if __name__ == "__main__":
    main()
