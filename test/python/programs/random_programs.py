"""Random programs on quantized models beside plain twins of them.

A program is a pure function of a seed and the number of ranks: a model of two or three layers, and
5 to 30 steps (program_*_steps.py, program_collectives.py). After each step every parameter and every
tensor that the program made must have the value of its plain twin, bit for bit; without a master what
a flush leaves of it. What raises on the twin must raise, and change nothing; what does not must not,
or be one of REFUSALS (program_run.py). A difference is shrunk to the shortest program that still shows
one.

    python random_programs.py --programs 10000 --seed 0 --ranks 2 --jobs 4
    python random_programs.py --programs 1 --seed 17 --ranks 2 --verbose --save 17.json
    python random_programs.py --program programs/910940.json --repeat 5
"""

import argparse
import contextlib
import json
import pickle
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "harness"))

import torch.distributed as dist
from dist_helpers import World
from program_files import Program, load_program, make_program, save_program
from program_isolation import isolated
from program_known import kind_of, without_known
from program_run import Difference, Run
from program_steps import KINDS

import qshard

SHRINK_RUNS, SHRINK_STOP_RUNS = 80, 10
PROGRAMS_PER_CALL = 100
CALL_S = 280  # of one call to the workers

# -------------------------------------------------------------------------------- many


@dataclass(frozen=True)
class Finding:
    seed: int
    difference: Difference
    program: Program
    shortest: Program
    shortest_difference: Difference

    def __str__(self):
        return (
            f"seed {self.seed}, step {self.difference.step}:\n{self.difference.text}\n"
            f"shortest {self.shortest}\nshows after step {self.shortest_difference.step}:\n"
            f"{self.shortest_difference.text}"
        )


@dataclass(frozen=True)
class Result:
    """The result of a program that came to its end."""

    finding: Finding | None
    endings: Counter  # of its steps
    digest: str  # of all final values on this rank


class Runner:
    """Runs programs on this rank, each with a folder of its own that all ranks know the name of."""

    def __init__(self, folder, delays):
        self.folder, self.count, self.delays = Path(folder), 0, delays
        self.gloo_group = dist.new_group(backend="gloo")

    def __call__(self, program, begin):
        """(the Difference or None, the Run)"""
        self.count += 1
        with warnings.catch_warnings(), isolated(program.seed), debugged(program.ranks):
            warnings.simplefilter("ignore")
            folder = self.folder / str(self.count)
            run = Run(program, folder, self.gloo_group, begin, self.delays)
            return run.difference(), run


@contextlib.contextmanager
def debugged(ranks):
    """Worlds of several ranks compare what they think is written, where qshard can do that."""
    if ranks == 1 or not hasattr(qshard, "debug"):
        yield
        return
    qshard.debug(True)
    try:
        yield
    finally:
        qshard.debug(False)


def shrink(program, found, run, budget=SHRINK_RUNS):
    """The shortest program found by dropping steps, and its difference. `run(kept)` runs the steps of
    these numbers and returns a Difference or None."""
    kept, runs = list(range(len(program.steps)))[: found.step + 1], 0
    size = max(1, len(kept) // 2)
    while size and runs < budget:
        start, dropped = 0, False
        while start < len(kept) and runs < budget:
            fewer = kept[:start] + kept[start + size :]
            runs += 1
            again = run(fewer)
            if again:
                kept, found, dropped = fewer[: again.step + 1], again, True
            else:
                start += size
        size = size // 2 or int(dropped)
    return some_steps(program, kept), found


def some_steps(program, kept):
    return replace(program, steps=tuple(program.steps[i] for i in kept))


def run_programs(programs, folder, shrinks=True, delays=True, seconds=CALL_S):
    """On every rank: runs the programs, as many as there is time for, and returns how many that were.
    Notes in `folder` what is under way on each rank, and for each program that is done what was found,
    so that both are known of ranks that do not come back."""
    start, rank, run = time.monotonic(), dist.get_rank(), Runner(folder, delays)
    log = (Path(folder) / f"rank{rank}.log").open("a")
    results = (Path(folder) / f"rank{rank}.results").open("ab")
    with log, results:
        for number, program in enumerate(programs):
            late = [time.monotonic() - start > seconds]
            if program.ranks > 1:
                dist.broadcast_object_list(late)
            if late[0]:
                return number

            def begin(text, kept=range(len(program.steps)), number=number):
                print(json.dumps([number, text, list(kept)]), file=log, flush=True)

            def run_some(kept, program=program, begin=begin):
                return run(some_steps(program, kept), lambda text: begin(text, kept))[0]

            found, done = run(program, begin)
            digest = done.digest()
            if found:
                best = shrink(program, found, run_some) if shrinks else (program, found)
                found = Finding(program.seed, found, program, *best)
            pickle.dump(Result(found, done.endings, digest), results)
            del done
            results.flush()
    return len(programs)


# ------------------------------------------------------------------------- in the test


@dataclass(frozen=True)
class Stop:
    """A program whose world did not come back: a hang, or a process that ended."""

    program: Program
    step: str
    text: str

    def is_hang(self):
        return bool(re.search(r"[Tt]imed? ?out|no answer", self.text))

    def __str__(self):
        kind = "hang" if self.is_hang() else "crash"
        return f"{kind} at {self.step}\n{self.program}\n{self.text}"


def run_on(world, programs, shrinks=True, progress=lambda count, wrong: None, delays=True):
    """Runs programs on a world; returns (findings, stops, endings of steps)."""
    findings, stops, endings, left = [], [], Counter(), list(programs)
    while left:
        results, stop = call(world, left[:PROGRAMS_PER_CALL], shrinks, delays)
        found = [result.finding for result in results if result.finding]
        stopped = [shrink_stop(world, stop) if shrinks else stop] if stop else []
        findings += found
        stops += stopped
        endings += sum((result.endings for result in results), Counter())
        done = len(results) + len(stopped)
        left = left[done:]
        progress(done, found + stopped)
    return findings, stops, endings


def call(world, programs, shrinks, delays=True):
    """The Results of the programs that came to their end, and a Stop or None."""
    with tempfile.TemporaryDirectory(dir=shared_memory()) as folder:
        outcomes = world.outcomes(
            run_programs, programs, folder, shrinks, delays, wait_s=2 * CALL_S
        )
        errors = [outcome.error for outcome in outcomes if outcome.error]
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(world.size)]
        lines = [log.read_text().splitlines() for log in logs if log.exists()]
        begun = [json.loads(of_rank[-1]) for of_rank in lines if of_rank]
        if not begun:
            raise RuntimeError("no program was begun:\n" + "\n".join(errors))
        results = list(read_pickles(Path(folder) / "rank0.results"))
        if not errors:
            return results, None
        number, step, kept = min(begun, key=lambda line: line[0])  # of the slowest rank
        texts = "\n".join(error[-1500:] for error in errors)
        return results[:number], Stop(some_steps(programs[number], kept), step, texts)


def read_pickles(path):
    with path.open("rb") as file:
        while file.peek(1):
            yield pickle.load(file)


def shrink_stop(world, stop):
    """A shorter program that stops, too. Each run that does takes as long as a collective's timeout."""
    last = stop

    def run(kept):
        nonlocal last
        _, again = call(world, [some_steps(stop.program, kept)], shrinks=False)
        if not again:
            return None
        last = again
        return Difference(len(kept) - 1, "")

    whole_program = Difference(len(stop.program.steps) - 1, "")
    shrink(stop.program, whole_program, run, budget=SHRINK_STOP_RUNS)
    return last


def shared_memory():
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--program", nargs="+", metavar="FILE", help="saved ones, of as many ranks")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each program")
    parser.add_argument("--save", metavar="FILE", help="write the first program to a file, run none")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1, help="worlds at a time")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the files', or cpu")
    parser.add_argument("--without", help="a regular expression of steps to leave out")
    parser.add_argument("--only", help="a regular expression of kinds of steps to draw")
    parser.add_argument("--known", action="store_true", help="draw what differs (program_known.py), too")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--no-delays", action="store_true", help="of the streams of a GPU")
    parser.add_argument("--verbose", action="store_true", help="print the programs")
    args = parser.parse_args()
    if args.program:
        saved = [load_program(file) for file in args.program]
        programs, devices = zip(*saved)
        device = args.device or devices[0]
        ranks = programs[0].ranks
        assert all(program.ranks == ranks for program in programs), "files of other numbers of ranks"
    else:
        seeds, ranks = range(args.seed, args.seed + args.programs), args.ranks
        device = args.device or "cpu"
        programs = [make_program(seed, ranks, device, args.without, args.only) for seed in seeds]
        if not args.known:
            programs = list(map(without_known, programs))
    if args.verbose:
        print(*programs, sep="\n")
    if args.save:
        save_program(programs[0], args.save, device)
        return False
    worlds = [World(device, ranks, lane) for lane in range(args.jobs)]
    findings, stops, endings = run_on_worlds(
        worlds, [p for p in programs for _ in range(args.repeat)], not args.no_shrink, not args.no_delays
    )
    for name in sorted(KINDS):
        counts = {end: count for (kind, end), count in endings.items() if kind == name}
        if counts or not args.program:
            print(f"  {name}: " + ", ".join(f"{counts[end]} {end}" for end in sorted(counts)))
    if args.repeat > 1:
        for program in programs:
            wrong = [f.difference.step for f in findings if f.seed == program.seed]
            stopped = [stop for stop in stops if stop.program.seed == program.seed]
            print(
                f"seed {program.seed}: {len(wrong)} of {args.repeat} runs differ, "
                f"after steps {sorted(set(wrong))}; {len(stopped)} stop"
            )
    hangs = sum(stop.is_hang() for stop in stops)
    print_kinds(findings, stops)
    print(
        f"{len(programs)} programs on {worlds[0]}, {len(findings)} differences, {hangs} hangs, "
        f"{len(stops) - hangs} crashes, seeds {programs[0].seed}..{programs[-1].seed}"
    )
    return bool(findings or stops)


def print_kinds(findings, stops):
    """What was found, by kind. If a program was not shrunk, the step that shows it is its last."""
    seeds = {}
    for finding in findings:
        shortest = finding.shortest
        until = replace(shortest, steps=shortest.steps[: finding.shortest_difference.step + 1])
        seeds.setdefault(kind_of(until), []).append(finding.seed)
    for stop in stops:
        end = "hang" if stop.is_hang() else "crash"
        seeds.setdefault(f"{end}, {kind_of(stop.program)}", []).append(stop.program.seed)
    for kind, of_kind in sorted(seeds.items(), key=lambda item: -len(item[1])):
        print(f"{len(of_kind):5} {kind}: seeds {', '.join(map(str, of_kind[:6]))}")


def run_on_worlds(worlds, programs, shrinks, delays):
    """As run_on, at the same time; prints what is found, the same of a program once."""
    from tqdm import tqdm

    findings, stops, endings, printed = [], [], Counter(), set()
    with ThreadPoolExecutor(len(worlds)) as jobs, tqdm(total=len(programs), file=sys.stderr) as bar:

        def progress(count, wrong):
            bar.update(count)
            for text in map(str, wrong):
                if text not in printed:
                    bar.write(f"{text}\n", file=sys.stdout)
                    printed.add(text)

        parts = [
            jobs.submit(run_on, world, programs[i :: len(worlds)], shrinks, progress, delays)
            for i, world in enumerate(worlds)
        ]
        for part in parts:
            found, stopped, ended = part.result()
            findings += found
            stops += stopped
            endings += ended
    return findings, stops, endings


if __name__ == "__main__":
    from random_programs import main as main_of_module  # what is pickled has this module's name

    sys.exit(main_of_module())
