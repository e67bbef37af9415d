"""Loads the library under test when it is imported, in whatever process."""

import os

import torch


def load_library():
    """QSHARD_LIBRARY names a libqshard.so to test without the package; else the installed package."""
    path = os.environ.get("QSHARD_LIBRARY")
    if path:
        torch.ops.load_library(path)
    else:
        import qshard  # noqa: F401


load_library()
