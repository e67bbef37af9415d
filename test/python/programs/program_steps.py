"""The steps that random programs are made of: how each is drawn, and what it does to a subject.

A step does the same to the quantized subject and to its plain twin. It returns what is to be compared,
or yields that in several stages; what it raises in the twin it must raise in the other. Arguments are
plain numbers and names: a step means something whatever steps before it were dropped.
"""

import re
from dataclasses import dataclass, field

KINDS = {}  # by name
FRACTIONS = (0.0, 0.1, 0.25, 0.4, 0.5, 0.75, 0.9, 1.0)
MAX_REGISTERS = 5


@dataclass(frozen=True)
class Step:
    """One step of a program."""

    name: str
    args: dict

    def __str__(self):
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.args.items())})"

    def run(self, subject):
        if KINDS[self.name].reads:
            subject.catch_up()
        return KINDS[self.name].run(subject, **self.args)


@dataclass(frozen=True)
class Kind:
    weight: float
    draw: object  # (Draw) -> arguments, or None where the step does not apply
    run: object  # (subject, **arguments)
    reads: bool


def step(weight, draw=lambda d: {}, reads=False):
    """Registers a kind of step. `weight`: how often it is drawn. `reads`: it writes no value, but may
    flush: the twin first takes over what that has rounded."""

    def install(run):
        KINDS[run.__name__] = Kind(weight, draw, run, reads)
        return run

    return install


@dataclass
class Draw:
    """Draws the arguments of steps."""

    rng: object
    setup: object
    ranks: int
    device_type: str = "cpu"
    only: str | None = None
    registers: list = field(default_factory=list)
    checkpoints: dict = field(default_factory=dict)
    made: int = 0

    def step(self):
        names = sorted(KINDS)  # whatever order they were registered in
        if self.only:
            names = [name for name in names if re.search(self.only, name)]
        for _ in range(10**4):
            name = self.rng.choices(names, [KINDS[name].weight for name in names])[0]
            args = KINDS[name].draw(self)
            if args is not None:
                return Step(name, args)
        return Step("flush", {})  # none of `only` applies

    def choice(self, values):
        return self.rng.choice(list(values))

    def chance(self, probability):
        return self.rng.random() < probability

    def seed(self):
        return self.rng.randrange(10**6)

    def number(self):
        return self.choice((0.5, 0.75, 1.5, 3.0, -1.0, 8.0))

    def interval(self):
        return tuple(sorted((self.choice(FRACTIONS), self.choice(FRACTIONS))))

    def parameter(self):
        layer = self.rng.randrange(len(self.setup.layers))
        kind = "b" if self.setup.layers[layer].bias and self.chance(0.1) else "w"
        return f"{kind}{layer}"

    def target(self):
        if self.registers and self.chance(0.5):
            return self.choice(self.registers)
        return self.parameter()

    def new_register(self):
        self.made += 1
        name = f"r{self.made}"
        self.registers = [*self.registers[1 - MAX_REGISTERS :], name]
        return name

    def new_checkpoint(self, kind):
        name = f"c{len(self.checkpoints)}"
        self.checkpoints[name] = kind
        return name

    def view(self, target):
        """Up to two view operations. Whether they raise must be the same on all ranks: a write that
        some ranks alone make ends in a collective that they alone enter."""
        kinds = ["rows", "rows", "rows", "cols", "t", "every", "narrow", "strided", "split"]
        kinds += ["unsqueeze", "expand_as", "diagonal"]
        by_shape = ["flat", "col", "as_strided", "row"]  # they raise for some shapes
        views = []
        for _ in range(self.choice((0, 1, 1, 1, 2))):
            any_shape = not self.setup.sharded
            whole = target[0] == "w" and not views
            kind = self.choice(kinds + by_shape[: 4 if any_shape else 3 if whole else 0])
            views.append(self.one_view(kind))
        return tuple(views)

    def one_view(self, kind):
        if kind in ("rows", "cols", "narrow"):
            return (kind, *self.interval())
        if kind in ("every", "strided"):
            return (kind, self.choice((2, 3)))
        if kind in ("row", "col", "split", "as_strided"):
            return (kind, self.choice(FRACTIONS[:-1]))
        return (kind,)
