"""Random programs on quantized models beside plain twins of them.

A program is a pure function of a seed and the number of ranks: a model of two or three layers, and
5 to 30 steps (program_*_steps.py, program_collectives.py). After each step every parameter and every
tensor that the program made must have the value of its plain twin, bit for bit; without a master what
a flush leaves of it. What raises on the twin must raise, and change nothing; what does not must not,
or be one of REFUSALS (program_run.py). A difference is shrunk to the shortest program that still shows
one.

    python random_programs.py --programs 10000 --seed 0 --ranks 2 --jobs 4
    python random_programs.py --programs 1 --seed 17 --ranks 2 --verbose
"""

import argparse
import json
import pickle
import random
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from dist_helpers import World
from program_models import Setup, draw_setup
from program_run import Difference, Run
from program_steps import KINDS, Draw

SHRINK_RUNS, SHRINK_STOP_RUNS = 80, 10
PROGRAMS_PER_CALL = 100
CALL_S = 280  # of one call to the workers

# --------------------------------------------------------------------------------- programs


@dataclass(frozen=True)
class Program:
    seed: int
    ranks: int
    setup: Setup
    steps: tuple

    def __str__(self):
        lines = [f"program of seed {self.seed} on {self.ranks} ranks: {self.setup}"]
        return "\n".join(lines + [f"  {i}: {step}" for i, step in enumerate(self.steps)])


def make_program(seed, ranks, device_type="cpu", without=None):
    """`without`: a regular expression of steps to leave out."""
    rng = random.Random(f"{seed} {ranks}")
    setup = draw_setup(rng, ranks, device_type)
    draw = Draw(rng, setup, ranks)
    steps = tuple(draw.step() for _ in range(rng.randint(5, 30)))
    if without:
        steps = tuple(step for step in steps if not re.search(without, str(step)))
    return Program(seed, ranks, setup, steps)


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


class Runner:
    """Runs programs on this rank, each with a folder of its own that all ranks know the name of."""

    def __init__(self, folder):
        self.folder, self.count = Path(folder), 0
        self.gloo_group = dist.new_group(backend="gloo")

    def __call__(self, program, begin):
        """(the Difference or None, the endings of its steps)"""
        self.count += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = Run(program, self.folder / str(self.count), self.gloo_group, begin)
            return run.difference(), run.endings


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


def run_programs(programs, folder, shrinks=True, seconds=CALL_S):
    """On every rank: runs the programs, as many as there is time for, and returns how many that were.
    Notes in `folder` what is under way on each rank, and for each program that is done what was found,
    so that both are known of ranks that do not come back."""
    start, rank, run = time.monotonic(), dist.get_rank(), Runner(folder)
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

            found, endings = run(program, begin)
            if found:
                best = shrink(program, found, run_some) if shrinks else (program, found)
                found = Finding(program.seed, found, program, *best)
            pickle.dump((found, endings), results)
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


def run_on(world, programs, shrinks=True, progress=lambda count, wrong: None):
    """Runs programs on a world; returns (findings, stops, endings of steps)."""
    findings, stops, endings, left = [], [], Counter(), list(programs)
    while left:
        results, stop = call(world, left[:PROGRAMS_PER_CALL], shrinks)
        found = [finding for finding, _ in results if finding]
        stopped = [shrink_stop(world, stop) if shrinks else stop] if stop else []
        findings += found
        stops += stopped
        endings += sum((ended for _, ended in results), Counter())
        done = len(results) + len(stopped)
        left = left[done:]
        progress(done, found + stopped)
    return findings, stops, endings


def call(world, programs, shrinks):
    """What was found in the programs that came to their end, and a Stop or None."""
    with tempfile.TemporaryDirectory(dir=shared_memory()) as folder:
        outcomes = world.outcomes(run_programs, programs, folder, shrinks, wait_s=2 * CALL_S)
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
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1, help="worlds at a time")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--without", help="a regular expression of steps to leave out")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="print the programs")
    args = parser.parse_args()
    from tqdm import tqdm

    seeds = range(args.seed, args.seed + args.programs)
    programs = [make_program(seed, args.ranks, args.device, args.without) for seed in seeds]
    if args.verbose:
        print(*programs, sep="\n")
    differences = hangs = crashes = 0
    endings = Counter()
    with ThreadPoolExecutor(args.jobs) as jobs, tqdm(total=len(seeds), file=sys.stderr) as bar:

        def progress(count, wrong):
            bar.update(count)
            for found in wrong:
                bar.write(f"{found}\n", file=sys.stdout)

        worlds = [World(args.device, args.ranks, lane) for lane in range(args.jobs)]
        parts = [
            jobs.submit(run_on, world, programs[lane :: args.jobs], not args.no_shrink, progress)
            for lane, world in enumerate(worlds)
        ]
        for part in parts:
            findings, stops, ended = part.result()
            endings += ended
            differences += len(findings)
            hangs += sum(stop.is_hang() for stop in stops)
            crashes += sum(not stop.is_hang() for stop in stops)
    for name in sorted(KINDS):
        counts = {end: count for (kind, end), count in endings.items() if kind == name}
        print(f"  {name}: " + ", ".join(f"{counts[end]} {end}" for end in sorted(counts)))
    print(
        f"{args.programs} programs on {args.device}-{args.ranks}, {differences} differences, "
        f"{hangs} hangs, {crashes} crashes, seeds {seeds[0]}..{seeds[-1]}"
    )
    return bool(differences or hangs or crashes)


if __name__ == "__main__":
    from random_programs import main as main_of_module  # what is pickled has this module's name

    sys.exit(main_of_module())
