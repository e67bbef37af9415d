"""Tensors on meta, fake tensors and tensors of two devices: an operator that cannot work with them says so
by name, and none returns memory that nothing has written."""

import re
from functools import partial

import pytest
import torch
from argument_values import FORMAT, planes, weight
from flat_ranges import agree
from forked import outcome, refusal
from helpers import FORMATS
from nn_helpers import RECIPES
from torch._subclasses.fake_tensor import FakeTensorMode

import qshard
from qshard._runtime.classes import TensorState

ops = torch.ops.qshard
X = torch.randn(4, 48)
HEADS = torch.randn(2, 3, 4, 8)
TABLE = torch.randn(3, 8)


BYTES = torch.zeros(4 * 48 + 16, dtype=torch.uint8)
NO_META_KERNEL = {
    "_transposed_operand": lambda x, b: ops._transposed_operand(x),
    "_grouped_gemm": lambda x, b: ops._grouped_gemm(x, x, x, x, b),
    "_message_amax": lambda x, b: ops._message_amax(x, "float8_tensorwise"),
    "_encode_activation": lambda x, b: ops._encode_activation(x, FORMAT, False, x[0, :1]),
    "_decode_activations": lambda x, b: ops._decode_activations(
        b, "float8_tensorwise", False, [4, 48], 0, torch.float32
    ),
    "_quantize_for_uses": lambda x, b: ops._quantize_for_uses(x, FORMAT, []),
    "_agree_on_ranges": lambda x, b: agree([x[0]], [(FORMAT, 4, 48, 0)]),
    "_agree_on_histories": lambda x, b: ops._agree_on_histories([x[0, :3]], [2], 0, x.device),
}


@pytest.mark.parametrize("kind", ["meta", "fake"])
@pytest.mark.parametrize("name", NO_META_KERNEL)
def test_tensors_without_values_are_refused_where_no_kernel_gives_shapes(name, kind):
    def call():
        if kind == "meta":
            return NO_META_KERNEL[name](X.to("meta"), BYTES.to("meta"))
        with FakeTensorMode() as mode:
            return NO_META_KERNEL[name](mode.from_tensor(X), mode.from_tensor(BYTES))

    if kind == "meta":
        text = refusal(call)
        assert f"qshard::{name}: " in text and "on meta, or traced" in text
    elif len(getattr(ops, name).default._schema.returns) > 0:
        # FakeTensorMode's own words where an operator is not implemented, which break a graph.
        assert f"qshard.{name}" in refusal(call)
    else:  # to FakeTensorMode an operator that returns nothing needs no kernel
        assert outcome(call) == ("returned", "None")


def mixed_calls(q):
    meta, grad, sum = partial(torch.empty, device="meta"), torch.ones(4, 64), torch.zeros(64, 48)
    messages = ops.quantize_gradients(X, "float8", 1, 192).view(1, 1, -1)
    return {
        "bias on meta": lambda: ops.linear(X, q, meta(64)),
        "input on meta": lambda: ops.linear(meta(4, 48), q),
        "weight on meta": lambda: ops.linear(X, q.to("meta")),
        "linear_backward": lambda: ops.linear_backward(grad, q, meta(4, 48), False, True, True),
        "accumulate": lambda: ops.linear_backward_accumulate(
            grad, q, meta(4, 48), False, True, sum
        ),
        "sum_gradients": lambda: ops.sum_gradients(messages, "float8", 192, meta(192)),
        "sum_gradients of meta": lambda: ops.sum_gradients(
            messages.to("meta"), "float8", 192, torch.zeros(192)
        ),
        "quantize_gradients": lambda: ops.quantize_gradients(
            X, "float8", 1, 192, rounding=meta(3, dtype=torch.int32)
        ),
        "rotary": lambda: ops.rotary_embedding(HEADS, TABLE.to("meta"), TABLE.to("meta")),
        "join": lambda: ops.join_rotary_embedding(
            HEADS, HEADS, HEADS.to("meta"), TABLE, TABLE, [1, 1, 1]
        ),
        "swiglu": lambda: ops.swiglu_linear_forward(X, meta(4, 48), q, None, False),
        "amax": lambda: ops._encode_activation(X, "float8_tensorwise", False, meta(1)),
        "from_planes": lambda: ops.from_planes(planes()[0], meta(1, 1), FORMAT),
    }


@pytest.mark.parametrize("name", mixed_calls(None))
def test_tensors_of_two_devices_in_one_call_are_refused(name):
    text = refusal(mixed_calls(weight())[name])
    assert "qshard::" in text and re.search("on meta.* on cpu|on cpu.* on meta", text), text


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_left_on_meta_is_an_error_of_forward(format, bias):
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64, bias=bias), torch.nn.Linear(64, 32, bias=bias, device="meta")
    )
    qshard.quantize_(model, RECIPES[format])
    text = refusal(lambda: model(torch.randn(4, 32)))
    assert "qshard::" in text and "meta" in text and "to_empty" in text


LAYOUTS = {
    "coo": lambda: X.to_sparse(),
    "csr": lambda: X.to_sparse_csr(),
    "mkldnn": lambda: X.to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([X[:2], X[2:]]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_that_are_not_strided_are_refused(layout):
    odd, q = LAYOUTS[layout](), weight()
    calls = (
        lambda: ops.linear(odd, q),
        lambda: ops.linear(X, q, None, residual=odd),
        lambda: ops.rotary_embedding(odd, TABLE, TABLE),
        lambda: ops.quantize(odd, FORMAT),
        # torch itself refuses nested tensors where an operator has no kernel of autograd's
        lambda: ops.quantize_gradients(odd, "float8", 1, 192),
        lambda: ops._message_amax(odd, "float8_tensorwise"),
        lambda: ops._transposed_operand(odd),
        lambda: agree([odd], [(FORMAT, 48, 48, 0)]),
    )
    if layout == "nested":  # linear takes nested inputs, and says what else may not be nested
        assert "qshard::linear: the weight must be a strided tensor" in refusal(calls[1])
    for call in calls[2:4] if layout == "nested" else calls:
        text = refusal(call)
        assert "qshard::" in text and "expected a strided tensor, got layout" in text


def test_a_device_that_is_not_there_is_named():
    q = weight()
    assert "there is no device cuda:99" in refusal(
        lambda: TensorState(q).copy_to(torch.float32, torch.device("cuda:99"))
    )
