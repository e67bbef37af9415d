"""A pytest plugin that prints skipped tests by reason, and fails the run for a reason that it does not know.

A skip says what the machine lacks: a GPU, a version of torch, a package, `--full`. A combination of
parameters that means nothing is left out by `only_where` instead, so that no skip can hide a test.
"""

import re
from collections import Counter

import pytest

# What tests may need: packages of the clients, of the pages, and a compiler.
PACKAGES = (
    "accelerate", "bitsandbytes", "compressed_tensors", "g++", "lightning", "modelopt", "muon_fsdp2", "peft",
    "pytorch_optimizer", "safetensors", "schedulefree", "sphinx", "torchao", "torchtitan", "transformers", "trl",
)
KNOWN = re.compile(
    rf"\bneeds (a GPU|\d+ GPUs|torch (>=|≥) \d+\.\d+|({'|'.join(map(re.escape, PACKAGES))})(?!\w))|--full"
)


def is_known(reason):
    return KNOWN.search(reason) is not None


_reasons = {}  # by the test's, or the file's, name


def _note(report):
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _reasons[report.nodeid] = reason.removeprefix("Skipped: ")


def pytest_runtest_logreport(report):
    _note(report)


def pytest_collectreport(report):
    _note(report)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    _reasons.update(getattr(node, "workeroutput", {}).get("skips", {}))


def pytest_sessionfinish(session, exitstatus):
    if hasattr(session.config, "workeroutput"):  # one of the processes of pytest -n
        session.config.workeroutput["skips"] = _reasons
    elif exitstatus == pytest.ExitCode.OK and not all(map(is_known, _reasons.values())):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if not _reasons:
        return
    terminalreporter.section("skips by reason")
    for reason, number in Counter(_reasons.values()).most_common():
        terminalreporter.write_line(f"{number:6}  {reason}")
    for name, reason in _reasons.items():
        if not is_known(reason):
            terminalreporter.write_line(f"ERROR {name}: a skip for no known reason: {reason}", red=True)
