"""A pytest plugin that prints the seconds of each test file beside its budget.

A budget is what a file may take on 2 cores: the `BUDGET_S` that stands in it, else 30 s. No test fails
by it; the table at the end of a run says which files are over.
"""

import re
from collections import Counter
from pathlib import Path

BUDGET_S = 30
CLIENTS_BUDGET_S = 300  # of the files in clients/ that make test runs
_STATED = re.compile(r"^BUDGET_S = (\d+)", re.MULTILINE)
_seconds = Counter()
only_all_clients = ()  # files of clients/ that make test does not run; conftest.py sets it


def budget_of(file):
    """The text is read, not the module: the process that prints the table imports no tests."""
    stated = _STATED.search(file.read_text()) if file.is_file() else None
    return int(stated[1]) if stated else BUDGET_S


def pytest_runtest_logreport(report):
    _seconds[Path(report.nodeid.split("::")[0])] += report.duration


def pytest_terminal_summary(terminalreporter, config):
    if not _seconds:
        return
    terminalreporter.section("seconds per file, and its budget")
    clients = [file for file in _seconds if "clients" in file.parts and file.stem not in only_all_clients]
    rows = [(_seconds[file], budget_of(config.rootpath / file), file.stem) for file in _seconds]
    if clients:
        rows.append((sum(_seconds[file] for file in clients), CLIENTS_BUDGET_S, "clients/ of make test"))
    for seconds, budget, name in sorted(rows, reverse=True):
        over = "  over" if seconds > budget else ""
        terminalreporter.write_line(f"{seconds:7.1f} {budget:5}  {name}{over}")
    terminalreporter.write_line(f"{_seconds.total():7.1f}        in all")
