"""Kinds of differences that random programs are known to find. What draws one is left out of programs
unless --known is given. A change that cures a kind takes it out of the table."""

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Known:
    kind: str
    steps: str  # a regular expression of what draws it
    says: str  # what differs
    file: str  # in programs/, of one that shows it: random_programs.py --program programs/FILE.json
    setups: str = ""  # a regular expression of the setups where it does

    def draws(self, setup, step):
        return bool(re.search(self.setups, str(setup)) and re.search(self.steps, str(step)))

    def __str__(self):
        return f"{self.kind}: {self.says} (programs/{self.file}.json)"


KNOWN = (
    Known(
        "weight copied without blocking",
        r"^copy_over\(",
        "a non-blocking copy on another device takes the amax history of the weight along: forward raises",
        "copied_without_blocking",
        r"float8_delayed",
    ),
    Known(
        "written in a CUDA graph",
        r"^replay_graph\(",
        "replays of a write without a flush do not add up, and a capture without replays leaves garbage",
        "graph",
        r"no master",
    ),
)


def without_known(program):
    """The steps of a program that draw no known kind."""
    steps = (s for s in program.steps if not any(known.draws(program.setup, s) for known in KNOWN))
    return replace(program, steps=tuple(steps))


def kind_of(program):
    """What a program that differs is an example of; of an unknown kind its last step."""
    for known in KNOWN:
        if any(known.draws(program.setup, step) for step in program.steps):
            return known.kind
    return f"unknown: {program.steps[-1].name if program.steps else 'no step'}"
