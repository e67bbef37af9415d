"""What is an operator, and what is a method of a class (ops/classes.cpp)."""

import pytest
import torch
from forked import refusal
from fuzz_calls import schemas
from fuzz_methods import STATIC

from qshard._runtime.classes import Process, TensorState

MOST = 30


def test_few_operators_are_private():
    private = [name for name in schemas() if name.startswith("_") and "." not in name]
    assert len(private) <= MOST, private


def test_no_class_has_many_functions():
    methods = [name for name in TensorState(torch.zeros(1))._method_names() if not name.startswith("_")]
    static = [name for name in STATIC if name.startswith("TensorState.")]
    assert 10 < len(methods + static) <= MOST


@pytest.mark.parametrize("name, call", [
    ("TensorState.pack", lambda: TensorState(torch.zeros(1)).pack()),
    ("TensorState.set_rounding_key", lambda: TensorState(torch.zeros(1)).set_rounding_key(1)),
    ("TensorState.written_by_rank", lambda: TensorState.written_by_rank([], [True], 0, 1)),
    ("Process.make_shards", lambda: Process.make_shards(-7)),
])
def test_a_function_says_its_name_in_errors(name, call):
    assert f"qshard::{name}" in refusal(call)
