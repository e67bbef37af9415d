"""Other packages whose code qshard computes in other steps: in the versions in which that code was compared. Nothing here
imports these packages."""

import sys
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    """versions: minor versions whose code was compared. decorators: files whose functions the package puts around its
    own forwards."""

    name: str
    versions: tuple[tuple[int, int], ...]
    decorators: tuple[str, ...] = ()

    def version(self) -> tuple[int, int] | None:
        """The minor version that is loaded, or None."""
        try:
            first, second = sys.modules[self.name].__version__.split(".")[:2]
            return int(first), int(second)
        except (AttributeError, KeyError, ValueError):
            return None

    def is_known(self) -> bool:
        """Whether the version that is loaded was compared."""
        return self.version() in self.versions

    def why_unknown(self) -> str:
        """What to say of a version that was not compared."""
        known = ", ".join(f"{a}.{b}" for a, b in self.versions)
        version = getattr(sys.modules.get(self.name), "__version__", "of no version")
        return f"{self.name} {version} is not among the versions whose code is known ({known})"

    def defines(self, function: Callable, file: dict) -> bool:
        """Whether a function is the one that a file defines, within the package's own decorators."""
        for name in self.decorators:
            decorator = sys.modules.get(name)
            if decorator is not None and function.__globals__ is vars(decorator):
                function = function.__wrapped__
        return getattr(function, "__globals__", None) is file


TRANSFORMERS = Package("transformers", ((5, 23), (5, 24)), ("transformers.utils.deprecation",))
TORCHTITAN = Package("torchtitan", ((0, 2), (0, 3)))
