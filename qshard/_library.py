"""Finds and loads libqshard.so. Loading it registers the operators and installs the hooks."""

import ctypes
import importlib.metadata
import os
import warnings
from pathlib import Path

import torch

_IN_PACKAGE = Path("qshard", "lib", "libqshard.so")


def library_path() -> str:
    """Path of the library this package loads: `QSHARD_LIBRARY` if set, else the one beside this
    package, else, in a checkout, the installed one, which the source folder hides."""
    path = os.environ.get("QSHARD_LIBRARY")
    if path:
        return path
    own = Path(__file__).parent.parent / _IN_PACKAGE
    if not own.exists():
        for installed in importlib.metadata.distributions(name="qshard"):
            library = Path(installed.locate_file(_IN_PACKAGE))
            if library.exists():
                return str(library)
    return str(own)


def about_library(path: str) -> dict[str, str]:
    """What a libqshard.so says of itself: `torch` and `cuda` (versions; "" for none) it was built
    for, `cuda_architectures`, and `load_error`, "" if its operators are there. Loads it."""
    library = ctypes.CDLL(path)
    about = {}
    for name in ("load_error", "torch_version", "cuda_version", "cuda_architectures"):
        function = getattr(library, f"qshard_{name}", None)
        if function is None:
            raise ImportError(f"qshard: {path} is no libqshard.so of this version; reinstall it")
        function.restype = ctypes.c_char_p
        about[name.removesuffix("_version")] = function().decode()
    return about


def _load() -> None:
    # Pickling imports this package where only the library was in use, perhaps another build of it.
    if not hasattr(torch.ops.qshard, "_finish_loading"):
        _load_library(library_path())
    try:
        torch.ops.qshard._finish_loading()
    except RuntimeError as error:
        raise ImportError(str(error).splitlines()[0]) from None
    owner = torch.classes.qshard.Process.foreign_owner_of_key()
    if owner:
        raise ImportError(
            "qshard: the dispatch key PrivateUse3 is already in use by another library in this process "
            f"({owner}); quantized tensors do not work beside it"
        )


def _load_library(path: str) -> None:
    if not os.path.exists(path):
        raise ImportError(
            f"qshard: no library at {path}; install it (`pip install --no-build-isolation .` in a "
            "qshard checkout), or name one by QSHARD_LIBRARY"
        )
    with warnings.catch_warnings():  # what it warns of is raised here
        warnings.filterwarnings("ignore", message=r"qshard: .* is not loaded: ")
        try:
            torch.ops.load_library(path)
            error = about_library(path)["load_error"]
        except OSError as cause:
            raise ImportError(f"qshard: {path} does not load: {cause}") from cause
    if error:
        raise ImportError(error)


_load()
