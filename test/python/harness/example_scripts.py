"""The scripts of examples/, as modules that spawned ranks find, too."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[3] / "examples"


def example(name: str, folder: Path = EXAMPLES) -> ModuleType:
    """The script of this name."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(name)
