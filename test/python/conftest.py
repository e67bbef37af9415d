"""Loads the library under test before any test module is imported."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp

HERE = Path(__file__).parent
# test/reference, the oracle, and the rooms: the processes of a world are started once and import
# what the tests of all rooms send them. A package (harness/models) is imported by its own name.
rooms = sorted(
    {str(file.parent) for file in HERE.rglob("*.py") if not (file.parent / "__init__.py").exists()}
)
sys.path[:0] = [str(HERE.parent), *(room for room in rooms if room != str(HERE))]

import budgets  # noqa: E402
import dist_helpers  # noqa: E402
import library_under_test  # noqa: E402, F401
import skips  # noqa: E402
import thinning  # noqa: E402

# What the tests in clients/ run with (the Makefile's CLIENTS and MORE_CLIENTS). A file without an entry
# of its own needs the first.
CLIENTS = ("safetensors", "transformers", "accelerate", "peft")
MORE_CLIENTS = {
    "test_torchtitan": ("torchtitan",),
    "test_torchtitan_config": ("torchtitan",),
    "test_torchtitan_experts": ("torchtitan",),
    "test_torchtitan_fuse": ("torchtitan",),
    "test_torchtitan_modules": ("torchtitan",),
    "test_lightning": (*CLIENTS, "lightning"),
    "test_torchao": ("torchao",),
    "test_trl": (*CLIENTS, "trl"),
    "test_bitsandbytes": ("bitsandbytes",),
    "test_optimizer_packages": ("schedulefree", "pytorch_optimizer", "muon_fsdp2", "torchao", "bitsandbytes"),
    "test_low_bit_readers": (*CLIENTS, "compressed_tensors"),
    "test_low_bit_modelopt": ("safetensors", "modelopt"),
}
# What tells the version of torchtitan that a file is for, and the torch that this version needs.
TORCHTITAN_0_2 = "torchtitan.config.job_config", "FSDPModule"
TORCHTITAN_0_3 = "torchtitan.config.configurable", "DataParallelMeshDims"
TORCHTITANS = {
    "test_torchtitan": TORCHTITAN_0_2,
    "test_torchtitan_config": TORCHTITAN_0_3,
    "test_torchtitan_experts": TORCHTITAN_0_3,
    "test_torchtitan_fuse": TORCHTITAN_0_2,
    "test_torchtitan_modules": TORCHTITAN_0_3,
}
ONLY_ALL_CLIENTS = MORE_CLIENTS.keys() - {"test_low_bit_readers"}  # not in make test


class ForAnotherTorchtitan(pytest.Module):
    def collect(self):
        pytest.skip(
            "needs torchtitan of the other version; `make test-clients` runs 0.2 with torch 2.11 and 0.3 with "
            "TORCH=2.15.0", allow_module_level=True,
        )


class WithoutPackages(pytest.Module):
    missing = ()

    def collect(self):
        reason = f"needs {', '.join(self.missing)}; `make test-clients` installs the packages"
        if self.config.getoption("--all-clients"):
            raise self.CollectError(reason)
        pytest.skip(reason, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if HERE / "clients" not in module_path.parents:
        return None
    needed = MORE_CLIENTS.get(module_path.stem, CLIENTS)
    missing = [package for package in needed if find_spec(package) is None]
    if not missing:
        if module_path.stem not in TORCHTITANS:
            return None
        part, of_torch = TORCHTITANS[module_path.stem]
        if find_spec(part) is not None and hasattr(torch.distributed.fsdp, of_torch):
            return None
        return ForAnotherTorchtitan.from_parent(parent, path=module_path)
    module = WithoutPackages.from_parent(parent, path=module_path)
    module.missing = missing
    return module


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help=thinning.HELP)
    parser.addoption(
        "--all-clients", action="store_true", help="a package that a test of clients/ lacks is an error"
    )
    parser.addoption(
        "--ranks-share-gpus",
        action="store_true",
        help="worlds on GPUs have as many ranks as they want: those beyond the GPUs share them",
    )


def pytest_configure(config):
    budgets.only_all_clients = ONLY_ALL_CLIENTS
    for plugin in (budgets, skips):
        if not config.pluginmanager.is_registered(plugin):
            config.pluginmanager.register(plugin)
    dist_helpers.ranks_share_gpus = config.getoption("--ranks-share-gpus")
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))  # of pytest -n
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items):
    thinning.leave_out(config, items)
    if config.getoption("--full"):
        return
    thinning.keep_few(config, items)
    if not config.getoption("--all-clients"):
        for item in items:
            if item.get_closest_marker("takes_a_minute"):
                item.add_marker(pytest.mark.skip(reason="Inductor takes a minute: --all-clients or --full runs it"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    if nextitem is not None and nextitem.path != item.path:
        dist_helpers.collect_garbage()


_report_lines = []


@pytest.fixture(scope="session")
def report():
    """A list of lines to print after the test results."""
    return _report_lines


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # one of the processes of pytest -n
        session.config.workeroutput["report"] = _report_lines


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    _report_lines.extend(getattr(node, "workeroutput", {}).get("report", ()))


def pytest_terminal_summary(terminalreporter):
    if _report_lines:
        terminalreporter.section("qshard")
        for line in _report_lines:
            terminalreporter.write_line(line)
