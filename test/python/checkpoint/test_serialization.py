"""Pickles name `qshard.serialization`, and load without the package; those from before it, too."""

import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import assert_same, is_quantized, value, weight

import qshard
from qshard._runtime.classes import TensorState

ops = torch.ops.qshard
# Written when pickles named `_qshard_checkpoint`: every format, masters, writes that a group has
# yet to flush, views, and layouts of seven fields; beside them their values, one after the other.
BEFORE = Path(__file__).parents[1] / "files" / "before_serialization.pt"
# mxfp8 with a master and its value, by pickle alone.
BEFORE_PICKLE = BEFORE.with_suffix(".pkl")


@pytest.mark.parametrize("weights_only", [True, False])
def test_files_written_before_the_module_had_its_name_load(weights_only):
    file = torch.load(BEFORE, weights_only=weights_only)
    values, at = file["values"], 0
    assert len(file["tensors"]) == 22
    for name, q in file["tensors"].items():
        assert is_quantized(q), name
        expected = values[at : at + q.numel()].view(q.shape).to(q.dtype)
        at += q.numel()
        assert_same(q, expected, name)
        group, format = name.split("/")
        if group in ("codes", "seven_fields"):
            assert ops.format(q) == format and ops.master(q) is None
        assert (ops.master(q) is not None) == (group == "master" or format == "parameter")
        assert TensorState(q).has_pending_update() == (format == "shard")
        assert type(q) is (torch.nn.Parameter if format == "parameter" else torch.Tensor)
    assert at == values.numel()


def test_a_pickle_written_before_loads():
    q, expected = pickle.loads(BEFORE_PICKLE.read_bytes())
    assert is_quantized(q)
    assert_same(q, expected)


def saved(q):
    file = io.BytesIO()
    torch.save(q, file)
    return file.getvalue()


@pytest.mark.parametrize("dump", [saved, pickle.dumps])
def test_new_pickles_name_the_public_module(dump):
    data = dump(ops.quantize(weight(5, 20), "mxfp8"))
    assert b"qshard.serialization" in data and b"_qshard" not in data


def test_the_module_is_public():
    import qshard.serialization as module

    assert module is qshard.serialization is sys.modules["qshard.serialization"]
    assert module.rebuild_tensor.__module__ == "qshard.serialization"
    assert "read back" in module.__doc__ and module.rebuild_tensor.__doc__
    from qshard._runtime.checkpoint import rebuild_tensor

    assert rebuild_tensor is module.rebuild_tensor


def run(script, *arguments, importable, folder):
    environment = dict(os.environ, QSHARD_LIBRARY=qshard.library_path())
    environment["PYTHONPATH"] = str(Path(qshard.__file__).parent.parent) if importable else ""
    # Without the package: an installed one is hidden from the import system.
    hide = "" if importable else HIDE
    result = subprocess.run(
        [sys.executable, "-c", hide + script, *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


HIDE = """
import sys
from importlib.machinery import PathFinder

class WithoutPackage:
    @staticmethod
    def find_spec(name, path=None, target=None):
        found = name.partition(".")[0] != "qshard"
        return PathFinder.find_spec(name, path, target) if found else None

sys.meta_path[:] = [WithoutPackage if f is PathFinder else f for f in sys.meta_path if
                    f is PathFinder or "editable" not in type(f).__module__]
"""

ROUND_TRIP = """
import io, pickle, sys
import torch
torch.ops.load_library(sys.argv[1])
q = torch.ops.qshard.quantize(torch.randn(5, 20), "mxfp8", keep_master=True)
file = io.BytesIO()
torch.save(q, file)
for weights_only in (True, False):
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=weights_only) + 0, q + 0)
assert torch.equal(pickle.loads(pickle.dumps(q)) + 0, q + 0)
old, expected = torch.load(sys.argv[2], weights_only=True), 0
assert len(old["tensors"]) == 22
import qshard.serialization
assert qshard.serialization is sys.modules["qshard.serialization"]
try:
    print("quantize_" if qshard.quantize_ else "")
except AttributeError as error:
    print(error)
"""


@pytest.mark.parametrize("importable", [True, False], ids=["package", "only library"])
def test_pickles_go_round_after_load_library(importable, tmp_path):
    printed = run(ROUND_TRIP, qshard.library_path(), BEFORE, importable=importable, folder=tmp_path)
    expected = "quantize_" if importable else "the Python package is not installed"
    assert expected in printed


UNPICKLE = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    q, expected = pickle.load(file)
import torch
assert torch.ops.qshard.is_quantized(q) and torch.equal(q + 0, expected), q
"""


def test_unpickling_imports_the_package_and_loads_the_library(tmp_path):
    q = ops.quantize(weight(5, 20), "nvfp4")
    path = tmp_path / "tensor.pkl"
    path.write_bytes(pickle.dumps((q, value(q))))
    run(UNPICKLE, path, importable=True, folder=tmp_path)
