"""Errors say what is wrong with an argument, in one line of reasonable length."""

import pytest
import torch
import torch.distributed as dist
from argument_values import FORMAT, weight
from flat_ranges import agree, messages_of
from forked import refusal

import qshard.tensor_parallel  # _gather_tokens
from qshard._runtime.classes import TensorState
from qshard.gradients import message_bytes

ops = torch.ops.qshard
X = torch.randn(4, 48)


def test_an_unknown_format_is_an_error_of_linears():
    q = weight()
    x, grad, sum = X, torch.ones(4, 64), torch.zeros(64, 48)
    calls = {
        "qshard::linear": lambda **k: ops.linear(x, q, **k),
        "qshard::linear ": lambda **k: ops.linear(x.clone().requires_grad_(), q, **k),
        "qshard::linear  ": lambda **k: ops.linear_forward(x, q, None, False, **k),
        "qshard::linear_backward": lambda **k: ops.linear_backward(
            grad, q, x, False, True, True, **k
        ),
        "qshard::linear_backward ": lambda **k: ops.linear_backward_accumulate(
            grad, q, x, False, True, sum, **k
        ),
    }
    for op, call in calls.items():
        text = refusal(lambda: call(format="float9"))
        assert f"{op.strip()}: unknown format 'float9'" in text
    meta = [t.to("meta") for t in (x, q, grad)]
    assert "unknown format" in refusal(lambda: ops.linear(*meta[:2], format="float9"))
    assert "unknown format" in refusal(
        lambda: ops.linear_backward(meta[2], meta[1], meta[0], False, True, True, format="float9")
    )
    norm = dict(eps=1e-5, rms=True, format="float9")
    assert "unknown format" in refusal(lambda: ops.norm_linear(x, x[0], None, [q], **norm))
    mlp = ops.quantize(torch.randn(48, 64), FORMAT)
    for names in (("float9", FORMAT), (FORMAT, "float9")):
        formats = dict(zip(("format", "down_format"), names))
        assert "unknown format" in refusal(lambda: ops.swiglu_mlp(x, q, q, mlp, **formats))
    for op, call in calls.items():  # its own name is fine
        call(format=FORMAT)


def test_long_names_are_cut_in_errors():
    name = "x" * 100_000
    calls = (
        lambda: ops.quantize(X, name),
        lambda: ops.quantize(X, f"nvfp4[{name}]"),
        lambda: message_bytes(name, 1),
        lambda: ops._plane_copy(weight(), name),
        lambda: agree([X], [(name, 1, 1, 0)]),
        lambda: messages_of(X.flatten(), 1, [(name, 1, 1, 0)], []),
        lambda: ops._quantize_for_uses(X, name, []),
        lambda: ops._message_amax(X, name),
        lambda: ops._pre_all_gather(weight(), name),
    )
    for call in calls:
        assert len(refusal(call)) < 1000


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: X.t(), "not contiguous Float"),
        (lambda: X.int(), "contiguous Int"),
        (lambda: ops.quantize(X, FORMAT), "float8_blockwise"),
    ],
)
def test_an_error_says_which_property_is_wrong(make, found):
    tensor = make()
    text = refusal(lambda: agree([tensor], [(FORMAT, 48, 48, 0)]))
    assert "qshard::_agree_on_ranges" in text and found in text, text


def test_a_gather_of_tokens_names_itself():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD.group_name
        for dim, format in ((0, "float9"), (0, "x" * 100_000), (2, FORMAT), (-1, ""), (1, FORMAT)):
            with pytest.raises((ValueError, RuntimeError), match="qshard::_gather_tokens") as caught:
                ops._gather_tokens(X, dim, format, False, group)
            assert len(str(caught.value)) < 1000
        for make in (torch.ones, lambda *size: torch.ones(*size, device="meta")):
            for name in ("", "no group", "x" * 100_000):
                with pytest.raises(ValueError, match="qshard::_gather_tokens: no process group") as caught:
                    ops._gather_tokens(make(2, 16), 0, "", False, name)
                assert len(str(caught.value)) < 1000
    finally:
        dist.destroy_process_group()


def test_found_inf_must_be_one_number_that_can_be_read():
    def after_step(weight, found_inf):
        ops._flush_after_step([weight], [0], [True], found_inf)

    weight, elsewhere = ops.quantize(X, FORMAT), torch.zeros(1, device="meta")
    for found_inf in (torch.zeros(2), elsewhere, ops.quantize(torch.zeros(1, 1), FORMAT)):
        text = refusal(lambda found_inf=found_inf: after_step(weight, found_inf))
        assert "qshard::_flush_after_step: found_inf must be one plain number" in text, text
    after_step(weight, torch.zeros(1))
    after_step(ops.quantize(X.to("meta"), FORMAT), elsewhere)


def test_plain_tensors_are_called_plain():
    state = TensorState(X)
    calls = {
        "qshard::_mark_written": lambda: ops._mark_written(X),
        "qshard::TensorState.keeps_master": state.keeps_master,
        "qshard::TensorState.storage_bytes": state.storage_bytes,
        "qshard::TensorState.pack": state.pack,
        "qshard::TensorState.scaling_state": state.scaling_state,
        "qshard::TensorState.set_replicas": lambda: state.set_replicas(""),
    }
    for name, call in calls.items():
        text = refusal(call)
        assert "expected a quantized tensor, got plain" in text and name in text


@pytest.mark.parametrize("records_grad", [False, True])
def test_an_operator_that_calls_others_is_named(records_grad):
    """Which linear it was, and the call that the user made."""
    gate, down = weight(), ops.quantize(torch.randn(48, 64), FORMAT)
    export = TensorState(ops.quantize(X, "mxfp8", keep_master=True)).export_view()
    x = X.clone().requires_grad_(records_grad)
    codes = torch.zeros(4, 48, dtype=torch.uint8).view(torch.float8_e4m3fn)
    calls = {
        "swiglu_mlp": lambda: ops.swiglu_mlp(
            x, gate, gate, down, residual=export, format=FORMAT, down_format=FORMAT
        ),
        "norm_linear": lambda: ops.norm_linear(codes, x[0], None, [gate], eps=1e-5, rms=True),
    }
    for op, call in calls.items():
        text = refusal(call)
        assert "qshard::linear: " in text and f"(in qshard::{op}(" in text, text
