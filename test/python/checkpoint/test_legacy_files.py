"""Files of torch.save(..., _use_new_zipfile_serialization=False), whose bytes follow the pickle."""

import copy
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import FORMATS, assert_same, bits, fit, ops, state, value, weight

import qshard
from qshard._runtime.classes import TensorState

on_formats = pytest.mark.parametrize("fmt", FORMATS)


def quantized(fmt, keep_master=False, seed=0):
    return ops.quantize(weight(fit(fmt, 67), 48, seed=seed), fmt, keep_master=keep_master)


def saved(thing, legacy=True):
    file = io.BytesIO()
    torch.save(thing, file, _use_new_zipfile_serialization=not legacy)
    file.seek(0)
    return file


def assert_identical(loaded, q):
    assert loaded.requires_grad == q.requires_grad and type(loaded) is type(q)
    (geometry, *planes), (expected, *planes_of_q) = state(loaded), state(q)
    assert geometry == expected
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(planes, planes_of_q, strict=True))
    assert TensorState(loaded.detach()).pack()[2] == TensorState(q.detach()).pack()[2]
    assert_same(loaded, q)


@pytest.mark.parametrize("keep_master", [False, True], ids=["no-master", "master"])
@pytest.mark.parametrize("weights_only", [True, False])
@on_formats
def test_what_is_saved_anew_loads_the_same(fmt, weights_only, keep_master):
    q = quantized(fmt, keep_master)
    things = {"tensor": q, "parameter": torch.nn.Parameter(quantized(fmt, keep_master, 1)), "view": q[:32]}
    written = quantized(fmt, keep_master, 2)
    written.mul_(3)
    things["written"] = written
    # A share of more rows, whose update awaits a flush with the other ranks.
    share = ops.quantize(weight(32, 48), fmt, keep_master=keep_master, logical_rows=256, row_offset=32)
    share.add_(1)
    things["share"] = share
    things["plain"] = torch.arange(5)
    loaded = torch.load(saved(things), weights_only=weights_only)
    assert loaded.keys() == things.keys()
    assert torch.equal(loaded.pop("plain"), things.pop("plain"))
    for name, thing in things.items():
        assert_identical(loaded[name], thing)
    assert loaded["tensor"].untyped_storage().data_ptr() != q.untyped_storage().data_ptr()


@on_formats
def test_what_is_loaded_is_a_tensor_like_any_other(fmt):
    q = quantized(fmt, keep_master=True)
    loaded = torch.load(saved([q]), map_location="cpu")[0]
    assert_identical(copy.deepcopy(loaded), q)
    assert_identical(pickle.loads(pickle.dumps(loaded)), q)
    assert_identical(torch.load(saved(loaded, legacy=False)), q)
    for tensor in (loaded, q):
        tensor.mul_(2)
        ops.flush([tensor])
    assert_identical(loaded, q)
    assert torch.equal(ops.codes(loaded).view(torch.uint8), ops.codes(q).view(torch.uint8))


def test_modules_and_files_on_disk(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    qshard.quantize_(model, qshard.DelayedScaling())
    x = torch.randn(4, 48)
    model(x).sum().backward()
    torch.save(model, tmp_path / "model.pt", _use_new_zipfile_serialization=False)
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(loaded(x), model(x))
    for a, b in zip(loaded.parameters(), model.parameters(), strict=True):
        assert_same(a, b)


class Holder:
    """Holds tensors in a file within the file."""

    def __init__(self, tensors):
        self.tensors = tensors

    def __getstate__(self):
        return saved(self.tensors, legacy=False).getvalue(), pickle.dumps(self.tensors)

    def __setstate__(self, files):
        self.tensors = torch.load(io.BytesIO(files[0]), weights_only=False)
        self.seen = [value(tensor) for tensor in self.tensors]
        self.pickled = pickle.loads(files[1])


def test_files_within_files():
    outer, inner = quantized("nvfp4"), quantized("mxfp8", keep_master=True)
    loaded = torch.load(saved([outer, Holder([inner]), outer]), weights_only=False)
    holder = loaded[1]
    assert_identical(loaded[0], outer)
    assert_identical(holder.tensors[0], inner)
    assert_identical(holder.pickled[0], inner)
    assert_same(holder.seen[0], inner)  # it was there at once
    assert loaded[2] is loaded[0]


def test_a_file_that_ends_early_leaves_nothing_behind():
    q = quantized("float8_blockwise")
    whole = saved(q).getvalue()
    for length in range(0, len(whole), max(1, len(whole) // 40)):
        with pytest.raises(Exception):
            torch.load(io.BytesIO(whole[:length]))
    assert_identical(torch.load(io.BytesIO(whole)), q)


def test_what_a_file_claims_is_checked():
    data, pending, layout, fmt, state_of_it = TensorState(quantized("float8_blockwise")).pack()
    rebuild = qshard.serialization.rebuild_tensor

    class Claim:
        def __reduce__(self):
            rows = [layout[0] * 1000, *layout[1:]]
            return rebuild, (data, None, rows, fmt, [67, 48], [48, 1], 0, torch.float32, [], False)

    with pytest.raises(RuntimeError, match="saved quantized tensor"):
        torch.load(saved(Claim()), weights_only=False)


LOAD_FIRST = """
import sys, torch
try:
    torch.load(sys.argv[1], weights_only=False)
except RuntimeError as error:
    assert "`import qshard` first" in str(error), error
    print("refused")
assert torch.equal(torch.load(sys.argv[1], weights_only=False) + 0, torch.load(sys.argv[2]))
"""


def test_a_library_that_unpickling_loads_says_so(tmp_path):
    """The reader began without it: by name, and once."""
    q = quantized("mxfp8", keep_master=True)
    torch.save(q, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(value(q), tmp_path / "values.pt")
    root = str(Path(qshard.__file__).parent.parent)
    result = subprocess.run(
        [sys.executable, "-c", LOAD_FIRST, "legacy.pt", "values.pt"],
        cwd=tmp_path,
        env=dict(os.environ, QSHARD_LIBRARY=qshard.library_path(), PYTHONPATH=root),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip() == "refused"
