"""Random programs as values: drawn from a seed, and written to files and read from them.

A program of a file stays the same whatever kinds of steps the generator learns to draw.
"""

import json
import random
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from program_models import Layer, Setup, draw_setup
from program_steps import Draw, Step

SAVED = Path(__file__).with_name("saved")  # what programs have found, one a file


@dataclass(frozen=True)
class Program:
    seed: int
    ranks: int
    setup: Setup
    steps: tuple

    def __str__(self):
        lines = [f"program of seed {self.seed} on {self.ranks} ranks: {self.setup}"]
        return "\n".join(lines + [f"  {i}: {step}" for i, step in enumerate(self.steps)])


def make_program(seed, ranks, device_type="cpu", without=None, only=None):
    """`without`: a regular expression of steps to leave out, after they were drawn; `only`: of names of
    steps to draw."""
    rng = random.Random(f"{seed} {ranks}")
    setup = draw_setup(rng, ranks, device_type)
    draw = Draw(rng, setup, ranks, device_type, only)
    steps = tuple(draw.step() for _ in range(rng.randint(5, 30)))
    if without:
        steps = tuple(step for step in steps if not re.search(without, str(step)))
    return Program(seed, ranks, setup, steps)


def save_program(program, path, device_type, note=""):
    """`note`: what the program shows, for a reader of the file."""
    setup = {**asdict(program.setup), "dtype": str(program.setup.dtype)[6:]}
    head = {
        "note": note,
        "device": device_type,
        "seed": program.seed,
        "ranks": program.ranks,
        "setup": setup,
    }
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    steps = [f"  {json.dumps([step.name, step.args])}" for step in program.steps]
    Path(path).write_text("\n".join(["{", *lines, ' "steps": [', ",\n".join(steps), " ]", "}", ""]))


def load_program(path):
    """(the program, the device that it was drawn for)"""
    saved = json.loads(Path(path).read_text())
    setup = saved["setup"]
    layers = tuple(Layer(**layer) for layer in setup["layers"])
    setup = Setup(**{**setup, "layers": layers, "dtype": getattr(torch, setup["dtype"])})
    steps = tuple(Step(name, with_tuples(args)) for name, args in saved["steps"])
    return Program(saved["seed"], saved["ranks"], setup, steps), saved["device"]


def with_tuples(value):
    """JSON knows lists alone."""
    if isinstance(value, list):
        return tuple(map(with_tuples, value))
    if isinstance(value, dict):
        return {name: with_tuples(of_name) for name, of_name in value.items()}
    return value
