"""Loads the library under test before any test module is imported."""

import os
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp

HERE = Path(__file__).parent
# test/reference, the oracle, and the rooms: the processes of a world are started once and import
# what the tests of all rooms send them.
rooms = sorted({str(file.parent) for file in HERE.rglob("*.py")})
sys.path[:0] = [str(HERE.parent), *(room for room in rooms if room != str(HERE))]

import dist_helpers  # noqa: E402
import library_under_test  # noqa: E402, F401
import thinning  # noqa: E402

# What the tests in clients/ run with (the Makefile's CLIENTS and MORE_CLIENTS). A file without an entry
# of its own needs the first.
CLIENTS = ("safetensors", "transformers", "accelerate", "peft")
MORE_CLIENTS = {
    "test_torchtitan": ("torchtitan",),
    "test_torchtitan_config": ("torchtitan",),
    "test_torchtitan_experts": ("torchtitan",),
    "test_lightning": (*CLIENTS, "lightning"),
    "test_torchao": ("torchao",),
    "test_trl": (*CLIENTS, "trl"),
    "test_bitsandbytes": ("bitsandbytes",),
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
}
ONLY_ALL_CLIENTS = MORE_CLIENTS.keys() - {"test_low_bit_readers"}  # not in make test


class ForAnotherTorchtitan(pytest.Module):
    def collect(self):
        pytest.skip(
            "for another version of torchtitan or of torch; `make test-clients` runs 0.2 with torch 2.11 and "
            "0.3 with TORCH=2.15.0", allow_module_level=True,
        )


class WithoutPackages(pytest.Module):
    missing = ()

    def collect(self):
        reason = f"{', '.join(self.missing)} not installed; `make test-clients` installs the packages"
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
    dist_helpers.ranks_share_gpus = config.getoption("--ranks-share-gpus")
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))  # of pytest -n
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items):
    if not config.getoption("--full"):
        thinning.keep_pairs(config, items)


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
    if _seconds:
        print_seconds(terminalreporter)


# Seconds that a file may take on 2 cores. Nothing fails by it: the table at the end of a run says what
# is over. A new file is given its own here if 30 are not enough.
BUDGET_S = 30
BUDGETS_S = {
    "test_autocast": 45,  # compiles linears
    "test_accelerate_sharded": 60,
    "test_trainer_sharded": 75,
    "test_transformers": 90,  # Inductor compiles models
    "test_peft": 45,  # the same
    "test_quantize_callback": 60,
    "test_swiglu_mlp": 45,
    "test_torchao": 75,  # compiles its steps
    "test_lightning": 60,
    "test_torchtitan": 240,  # two processes write each asynchronous checkpoint
    "test_torchtitan_config": 360,  # the same; Inductor compiles models
    "test_torchtitan_experts": 300,
    "test_adoption_sharded": 90,
    "test_checkpoint_dcp": 90,
    "test_saved_operands": 60,  # compiles linears
    "test_saved_scales": 60,
    "test_copies_sharded": 180,
    "test_compile": 75,  # Inductor's first compilation takes 30 s
    "test_docs": 60,  # its compiled snippet takes 30 s
    "test_dynamic_optimizers": 45,
    "test_effects": 60,  # Inductor's first compilation
    "test_emulation": 60,  # the oracle is slow, and a case of each recipe compiles a model
    "test_expert_meshes": 60,
    "test_first_use": 90,
    "test_fsdp1": 60,
    "test_fsdp1_gather": 45,
    "test_fsdp1_ranks": 45,
    "test_fsdp1_state": 45,
    "test_fsdp1_use": 45,
    "test_factories_sharded": 90,
    "test_finetune_example": 60,  # two processes that import transformers
    "test_gathered_writes": 75,
    "test_fsdp_emulation": 45,
    "test_fsdp_mesh_invariance": 120,
    "test_fsdp_modes": 75,
    "test_fsdp_wire_and_memory": 60,
    "test_fused_adamw": 45,
    "test_install": 45,
    "test_fuzz_operators": 45,  # thousands of calls; nothing else of it takes long
    "test_gradient_reduction": 60,
    "test_gradient_rounding": 45,
    "test_gradient_special_values": 45,
    "test_kernels_reference": 60,
    "test_loading": 60,
    "test_module_results": 60,
    "test_module_state": 60,  # one case of each recipe compiles a linear
    "test_moves_sharded": 60,
    "test_nn_compile": 45,  # Inductor's first compilation
    "test_nn_sharded": 60,
    "test_low_bit_checkpoints": 60,
    "test_low_bit_tensor_parallel": 90,
    "test_replicas": 60,
    "test_pending_rows": 60,
    "test_replica_rounding": 75,
    "test_report_sent": 60,
    "test_shared_scales": 45,
    "test_shard_windows": 120,
    "test_sharded_state_dicts": 75,
    "test_no_rank_hangs": 90,  # one case waits for the process group's timeout
    "test_op_sweep": 60,
    "test_opcheck": 60,
    "test_optimizers": 45,
    "test_random_programs": 210,
    "test_saved_names": 60,  # compiles linears
    "test_quantize_after_wrapping": 45,
    "test_tensor_parallel": 120,
    "test_tensor_parallel_checkpoint": 60,
    "test_tensor_parallel_combined": 75,
    "test_tensor_parallel_modules": 60,
    "test_tensor_parallel_styles": 60,
    "test_tensor_parallel_training": 60,
    "test_what_loading_installs": 45,
    "test_tied_embeddings": 45,  # compiles lookups
    "test_trace_fallbacks": 45,
    "test_train_example": 45,
}
CLIENTS_BUDGET_S = 300  # of the files in clients/ that make test runs
_seconds, _clients = Counter(), set()


def pytest_runtest_logreport(report):
    file = Path(report.nodeid.split("::")[0])
    _seconds[file.stem] += report.duration
    if "clients" in file.parts and file.stem not in ONLY_ALL_CLIENTS:
        _clients.add(file.stem)


def print_seconds(terminalreporter):
    terminalreporter.section("seconds per file, and its budget")
    for file, seconds in _seconds.most_common():
        budget = BUDGETS_S.get(file, BUDGET_S)
        over = "  over" if seconds > budget else ""
        terminalreporter.write_line(f"{seconds:7.1f} {budget:5}  {file}{over}")
    clients = sum(_seconds[file] for file in _clients)
    if clients:
        over = "  over" if clients > CLIENTS_BUDGET_S else ""
        terminalreporter.write_line(f"{clients:7.1f} {CLIENTS_BUDGET_S:5}  clients/ of make test{over}")
    terminalreporter.write_line(f"{_seconds.total():7.1f}        in all")
