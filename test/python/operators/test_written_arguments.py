"""What our operators write beside their results: autograd and quantized tensors hear of it, and what may
not be written is refused before anything is."""

import pytest
import torch
from flat_ranges import agree
from forked import refusal
from helpers import bits

ops = torch.ops.qshard
DELAYED = "float8_delayed[history=16]"
X = torch.randn(4, 48)
WIDE, OF_WIDE, ONE = torch.randn(4, 384), ("float8_blockwise", 4, 384, 0), torch.ones(1)
GRAD = torch.randn(4, 64)


def weight(**kwargs):
    return ops.quantize(torch.randn(64, 48), "float8_blockwise", **kwargs)


def message(values):
    return ops.quantize_gradients(values, "float8", 1, values.numel()).view(1, 1, -1)


# name: (call that writes its argument, what it may be given, the argument's name)
WRITERS = {
    "sum_gradients": (
        lambda out: ops.sum_gradients(message(torch.ones(64, 48)), "float8", 64 * 48, out),
        lambda: torch.zeros(64, 48),
        "out",
    ),
    "linear_backward": (
        lambda out: ops.linear_backward(GRAD, weight(), X, False, True, False, input_sum=out),
        lambda: torch.zeros(4, 48),
        "input_sum",
    ),
    "linear_backward of the weight": (
        lambda out: ops.linear_backward(
            GRAD, weight(), X, False, True, True, input_sum=torch.zeros(4, 48), weight_grad=out
        ),
        lambda: torch.zeros(64, 48),
        "weight_grad",
    ),
    "linear_backward by another name": (
        lambda out: ops.linear_backward_accumulate(GRAD, weight(), X, False, True, out),
        lambda: torch.zeros(64, 48),
        "weight_grad",
    ),
    "swiglu_linear_backward": (
        lambda out: ops.swiglu_linear_backward(
            GRAD, X, X, weight(), torch.empty(0), True, True, False, False, weight_grad=out
        ),
        lambda: torch.zeros(64, 48),
        "weight_grad",
    ),
    "swiglu_linear_backward by another name": (
        lambda out: ops.swiglu_linear_backward_accumulate(
            GRAD, X, X, weight(), torch.empty(0), out, True, False, False
        ),
        lambda: torch.zeros(64, 48),
        "weight_grad",
    ),
    "swiglu_linear_backward of biases": (
        lambda out: ops.swiglu_linear_backward(
            GRAD, X, X, weight(), torch.empty(0), False, True, False, False, bias_grads=out
        ),
        lambda: torch.zeros(96),
        "bias_grads",
    ),
    "_read_messages": (
        lambda out: ops._read_messages(
            torch.full((1, 192), 0x38, dtype=torch.uint8), ["float8_tensorwise"], [4, 48, 0], [ONE], out
        ),
        lambda: torch.zeros(192),
        "out",
    ),
    "_agree_on_ranges of own amaxes": (
        lambda out: agree([WIDE], [OF_WIDE], own=[out]), lambda: torch.zeros(3), "own",
    ),
    "_agree_on_ranges": (lambda out: agree([WIDE], [OF_WIDE], amax=[out]), lambda: torch.zeros(3), "amax"),
    "_agree_on_ranges of the history": (
        lambda out: agree([X], [(DELAYED, 4, 48, 0)], state=[out, torch.zeros(3, 3)], steps=[7]),
        lambda: torch.zeros(3, 16),
        "state",
    ),
    "_agree_on_histories": (
        lambda out: ops._agree_on_histories([out], [2], 0, torch.device("cpu")),
        lambda: torch.zeros(3, 16),
        "amax_history",
    ),
}
writers = pytest.mark.parametrize("name", WRITERS)
# Codes have no gradient.
of_floats = pytest.mark.only_where(lambda name: WRITERS[name][1]().is_floating_point())


def expected_error(name, make):
    call, _, argument = WRITERS[name]
    text = refusal(lambda: call(make()))
    assert f"qshard::{name.split(' ')[0]}: {argument}" in text, text
    return text


@writers
def test_a_write_moves_the_version_counter_once(name):
    call, make, _ = WRITERS[name]
    out = make()
    before, version = out.clone(), out._version
    call(out)
    assert out._version == version + 1
    # A rank alone agrees with what it has collected.
    assert not torch.equal(out, before) or name == "_agree_on_histories"


@writers
@of_floats
def test_a_saved_tensor_that_was_written_is_an_error_of_backward(name):
    call, make, _ = WRITERS[name]
    out = make()
    leaf = torch.ones_like(out, requires_grad=True)
    product = leaf * out
    call(out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@writers
@of_floats
def test_a_tensor_that_requires_grad_is_not_written(name):
    call, make, _ = WRITERS[name]
    assert "requires grad" in expected_error(name, lambda: make().requires_grad_())
    assert "requires grad" in expected_error(name, lambda: make().requires_grad_() * 1)
    with torch.no_grad():  # as plain torch
        call(make().requires_grad_())


@writers
def test_a_quantized_tensor_is_not_written(name):
    def make():
        shape = WRITERS[name][1]().shape
        return ops.quantize(torch.zeros(1, *shape), "float8_blockwise", keep_master=True)[0]

    assert "is quantized" in expected_error(name, make)


@writers
def test_a_lazily_negated_view_is_not_written(name):
    assert "negated" in expected_error(name, lambda: torch._neg_view(WRITERS[name][1]()))


def test_lazily_negated_views_are_read_by_value():
    x = torch.randn(64, 48)
    out = torch.zeros(64, 48)
    ops.sum_gradients(message(torch._neg_view(x)), "float8", 64 * 48, out)
    expected = torch.zeros(64, 48)
    ops.sum_gradients(message(-x), "float8", 64 * 48, expected)
    assert torch.equal(out, expected)
    q = weight()
    ops.linear_backward_accumulate(GRAD, q, torch._neg_view(X), False, True, out.zero_())
    ops.linear_backward_accumulate(GRAD, q, -X, False, True, expected.zero_())
    assert torch.equal(out, expected)


@writers
def test_elements_that_share_memory_are_not_written(name):
    def make():
        like = WRITERS[name][1]()
        return like.flatten()[:1].expand(like.shape)

    assert "share memory" in expected_error(name, make)


def test_what_is_read_and_what_is_written_share_no_memory():
    memory = torch.zeros(64 * 48 + 4096)
    messages = message(torch.ones(64, 48))
    memory.view(torch.uint8)[: messages.numel()].copy_(messages.flatten())
    read = memory.view(torch.uint8)[: messages.numel()].view(messages.shape)
    kept = bits(memory).clone()
    for start in (0, 4, 100):
        out = memory[start : start + 64 * 48]
        text = refusal(lambda: ops.sum_gradients(read, "float8", 64 * 48, out))
        assert "shares memory" in text
    grad = torch.zeros(4, 48)
    q = ops.quantize(torch.randn(48, 48), "float8_blockwise")
    assert "shares memory" in refusal(
        lambda: ops.linear_backward(grad, q, X, False, True, False, input_sum=grad)
    )
    state = torch.zeros(3, 16), torch.zeros(3, 3)
    text = refusal(
        lambda: agree([X, X], [(DELAYED, 4, 48, 0)] * 2, state=[*state, *state], steps=[3, 3])
    )
    assert "shares memory" in text
    assert torch.equal(bits(memory), kept)


def test_a_write_to_a_master_is_heard_by_its_tensor():
    q = weight(keep_master=True)
    ops.codes(q)  # shown
    ops.sum_gradients(message(torch.full((64, 48), 3.0)), "float8", 64 * 48, ops.master(q))
    again = ops.quantize(torch.full((64, 48), 3.0), "float8_blockwise", keep_master=True)
    assert torch.equal(q + 0, again + 0)
    ops.flush([q])
    assert torch.equal(bits(ops.codes(q)), bits(ops.codes(again)))
    assert torch.equal(ops.dequantize(q), ops.dequantize(again))


def test_conjugated_views_are_resolved_or_refused():
    values = torch.randn(64, 48, dtype=torch.complex64).conj()
    assert "conjugated" in refusal(lambda: ops.sum_gradients(message(X), "float8", 192, values))
    text = refusal(lambda: agree([values], [("float8_tensorwise", 64, 48, 0)]))
    assert "got plain contiguous ComplexFloat" in text
