"""Finds and loads libqshard.so. Loading it registers the operators and installs the hooks."""

import os
import sys
from pathlib import Path

import torch


def library_path() -> str:
    """Path of the library this package loads: `QSHARD_LIBRARY` if set, else the installed one."""
    return os.environ.get("QSHARD_LIBRARY") or str(Path(__file__).parent / "lib" / "libqshard.so")


def _load() -> None:
    # Pickling imports this package where only the library was in use, perhaps another build of it.
    if "qshard.serialization" in sys.modules:
        return
    path = library_path()
    if not os.path.exists(path):
        raise ImportError(f"qshard: no library at {path}; run `pip install .` in a qshard checkout")
    try:
        torch.ops.load_library(path)
    except OSError as error:
        # The C++ ABI of torch changes with every minor version.
        raise ImportError(
            f"qshard: {path} does not load with torch {torch.__version__}: {error}. "
            "Build it against this torch: `pip install --no-build-isolation .` in a qshard checkout"
        ) from error
    owner = torch.ops.qshard._foreign_owner_of_key()
    if owner:
        raise ImportError(
            "qshard: the dispatch key PrivateUse3 is already in use by another library in this process "
            f"({owner}); quantized tensors do not work beside it"
        )


_load()
