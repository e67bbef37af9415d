"""Loads the library under test when it is imported, in whatever process. QSHARD_LIBRARY names a libqshard.so
to test without the package; else it is the installed package's."""

import os

import torch

if path := os.environ.get("QSHARD_LIBRARY"):
    torch.ops.load_library(path)
else:
    import qshard  # noqa: F401
