"""Loads the library under test before any test module is imported."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # test/reference, the oracle


def load_library():
    """QSHARD_LIBRARY names a libqshard.so to test without the package; else the installed package."""
    path = os.environ.get("QSHARD_LIBRARY")
    if path:
        torch.ops.load_library(path)
    else:
        import qshard  # noqa: F401


load_library()

_report_lines = []


@pytest.fixture(scope="session")
def report():
    """A list of lines to print after the test results."""
    return _report_lines


def pytest_terminal_summary(terminalreporter):
    if _report_lines:
        terminalreporter.section("qshard")
        for line in _report_lines:
            terminalreporter.write_line(line)
