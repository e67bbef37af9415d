"""Arguments of strangers: short errors that name the operator, or results that depend on the
arguments alone (fuzz_operators.py)."""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import fuzz_children
import fuzz_operators
import pytest
import torch
from fuzz_arguments import Draw
from fuzz_calls import is_plain, schemas
from torch.utils._pytree import tree_map_only

import qshard

BUDGET_S = 45  # thousands of calls; nothing else of it takes long
CALLS = 4000  # here; `python fuzz_operators.py --calls 100000` makes more
# Operators that raise a named error on the CPU, whatever they are given.
NEEDS_GPU = {"_normalize", "_quantize_normalized", "_grouped_gemm"}
NEEDS_RANKS = {"_gather_tokens", "_sum_and_scatter_tokens"}  # no process group is there


def test_every_call_is_an_error_or_a_result():
    program = Path(fuzz_operators.__file__)
    result = subprocess.run(
        [sys.executable, str(program), "--calls", str(CALLS)],
        env=dict(os.environ, QSHARD_LIBRARY=qshard.library_path()),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-20000:] + result.stderr[-2000:]
    never = result.stdout.splitlines()[-1].partition(": ")[2]
    assert set(never.split(", ")) <= NEEDS_GPU | NEEDS_RANKS | {"none"}


def text_of(draw):
    return str(tree_map_only(torch.Tensor, text_of_tensor, draw.arguments()))


def text_of_tensor(tensor):
    """Its values, too, unless its memory was freed: torch reads that all the same."""
    try:
        is_freed = tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
        return str(tensor.shape if is_freed else tensor)
    except (RuntimeError, NotImplementedError):  # freed codes, sparse ones
        return str(tensor.shape)


def test_a_call_depends_on_its_seed_alone():
    known = schemas()
    for seed, name in fuzz_operators.calls_of("", 0, 300):
        if "quant" in name or "rotary" in name:
            first, second = (Draw(known[name], seed) for _ in "ab")
            assert text_of(first) == text_of(second) and first.notes == second.notes
            assert fuzz_operators.calls_of(f"^{name}$", seed, 1) == [(seed, name)]


# ------------------------------------------------------------------- what each check is there for


def leave_new_memory(x):
    return torch.empty(x.numel() + 3)


def write_argument(x):
    x.detach().fill_(1)
    return x.detach().clone()


def write_beside_argument(x):
    ctypes.memset(x.data_ptr() - 5, 0, 1)
    return x.detach().clone()


def write_and_fail(x):
    x.detach().fill_(1)
    raise RuntimeError("qshard::_of_a_test: too late")


def say_little(x):
    raise RuntimeError("wrong")


def say_much(x):
    raise RuntimeError("qshard::_of_a_test: " + "x" * 2000)


def say_insides(x):
    raise RuntimeError("qshard::_of_a_test: x INTERNAL ASSERT FAILED")


def overlap(x):
    return torch.ones(3).as_strided((2, 2), (1, 1))


def double(x):
    return x.float() * 2


def zero_memory(x):
    ctypes.memset(x.untyped_storage().data_ptr(), 0, x.untyped_storage().nbytes())


def of_plain_tensors(function):
    """The function, for tensors whose memory it can take as it is."""

    def call(x):
        if not (
            type(x) in (torch.Tensor, torch.nn.Parameter) and is_plain(x) and x.numel() < 1 << 16
        ):
            raise TypeError("qshard::_of_a_test: a plain tensor")
        return function(x)

    return call


WRONG = {
    "uninitialised result": leave_new_memory,
    "undeclared write": write_argument,
    "write before a tensor": write_beside_argument,
    "half written": write_and_fail,
    "unnamed error": say_little,
    "long error": say_much,
    "assert": say_insides,
    "overlapping result": overlap,
}


@pytest.fixture
def operator():
    """Defines qshard::_of_a_test by a schema and a function, and gives the kinds of findings."""
    library = torch.library.Library("qshard", "FRAGMENT")

    def kinds_of(schema, function, calls=60):
        library.define(f"_of_a_test{schema}")
        function = of_plain_tensors(function)
        library.impl("_of_a_test", function, "CompositeExplicitAutograd")
        found, _ = fuzz_operators.run([(seed, "_of_a_test") for seed in range(calls)])
        assert not [finding for finding in found if finding[0] == "the fuzzer's own"]
        return {kind for kind, *_ in found}

    yield kinds_of
    library._destroy()
    torch.ops.qshard.__dict__.pop("_of_a_test", None)


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_found(kind, operator):
    assert kind in operator("(Tensor x) -> Tensor", WRONG[kind])


def test_writes_that_autograd_does_not_see_are_found(operator):
    found = operator("(Tensor(a!) x) -> ()", zero_memory, calls=150)
    assert {"no version bump", "writes a leaf"} <= found


def test_a_right_operator_is_found_right(operator):
    assert operator("(Tensor x) -> Tensor", double) == set()


# --------------------------------------------------------------------------------- crashes, hangs


def act(name, memory):
    if name == "reads on":
        there = memory.copy(torch.ones(3, dtype=torch.uint8))
        ctypes.string_at(there.data_ptr(), 4)
    if name == "dies":
        os.abort()
    if name == "hangs":
        time.sleep(60)
    return "done", {}, [], ""


@pytest.mark.parametrize(
    "name, kind",
    [("reads on", "read or write behind a tensor"), ("dies", "crash"), ("hangs", "hang")],
)
def test_the_call_that_ends_a_process_is_named(name, kind, monkeypatch):
    monkeypatch.setattr(fuzz_children, "SILENCE", 2)
    monkeypatch.setattr(fuzz_children, "schemas", lambda: {n: n for n in ("fine", name)})
    monkeypatch.setattr(fuzz_children, "try_call", lambda n, seed, memory, tell: act(n, memory))
    monkeypatch.setattr(fuzz_operators, "warm_up", lambda: None)
    found, outcomes = fuzz_operators.run([(0, "fine"), (1, name), (2, "fine")])
    assert [(k, n, seed) for k, n, seed, _, _ in found] == [(kind, name, 1)]
    assert outcomes["fine"]["done"] == 2
