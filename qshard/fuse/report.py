"""What fuse_ found, what it left, and what it knows."""

import sys
import warnings
from collections import Counter
from dataclasses import dataclass

from tabulate import tabulate

from qshard.fuse.registry import family_of


@dataclass(frozen=True)
class Fused:
    """A module that `fuse_` fused."""

    name: str
    module: str  # its class
    pattern: str


@dataclass(frozen=True)
class Left:
    """A module of a known class, or of a subclass of one, that `fuse_` left as it is."""

    name: str
    module: str
    reason: str


class FusedReport(list):
    """A list of Fused; prints as tables.

    left: a list of Left. known: what `fuse_` knows in the files that define the model's classes,
        by class."""

    def __init__(self, rows=(), left=(), known=None):
        super().__init__(rows)
        self.left, self.known = list(left), dict(known or {})

    def __str__(self) -> str:
        rows = [[row.name, row.module, row.pattern] for row in self]
        headers = ["module", "class", "fused"]
        parts = [tabulate(rows, headers=headers) if rows else "nothing recognised"]
        if self.left:
            of_kind = Counter((row.module, row.reason) for row in self.left)
            first = {(row.module, row.reason): row.name for row in reversed(self.left)}
            rows = [
                [f"{first[kind]} and {n - 1} more" if n > 1 else first[kind], *kind]
                for kind, n in of_kind.items()
            ]
            parts.append(tabulate(rows, headers=["module", "class", "left as it is, because"]))
        if self.known:
            known = [f"{cls} ({part})" for cls, part in self.known.items()]
            parts.append(f"known in the files of these classes: {', '.join(known)}")
        return "\n\n".join(parts)


def known_in_files_of(model) -> dict[str, str]:
    """The classes that are known of packages whose classes the model has, and their kinds of
    parts."""
    known = {}
    for cls in {type(module) for module in model.modules()}:
        for name, part in family_of(cls)[1].items():
            known[name] = type(part).__name__
    return dict(sorted(known.items()))


def missing_of_files(model) -> list[str]:
    """A sentence for a warning for each file that no longer has a known class."""
    said = {}
    for cls in {type(module) for module in model.modules()}:
        package, parts = family_of(cls)
        file = vars(sys.modules[cls.__module__]) if parts else {}
        lost = [name for name in parts if name not in file]
        if lost:
            said[cls.__module__] = (
                f"{cls.__module__} has no {', '.join(lost)}, which of {package.name} is known"
            )
    return sorted(said.values())


def warn_of(left, model) -> None:
    """Once for each class and reason. left: of each module (Left, whether to warn)."""
    kinds = {}
    for row, warns in left:
        if warns:
            kinds.setdefault((row.module, row.reason), []).append(row.name or "the model")
    said = [_sentence(names, *kind) for kind, names in kinds.items()]
    for text in (*said, *missing_of_files(model)):
        warnings.warn(f"qshard.fuse_: {text}", stacklevel=3)


def _sentence(names, cls, reason):
    if len(names) == 1:
        return f"{names[0]}, a {cls}, is left as it is: {reason}"
    return f"{names[0]} and {len(names) - 1} more of class {cls} are left as they are: {reason}"
