"""Quantized tensors in autograd and in inference mode."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, is_quantized, ops, value, weight
from test_tensor import keep_or_not


@keep_or_not
def test_gradients_through_any_op(keep_master):
    q = ops.quantize(weight(20, 32), "float8_blockwise", keep_master=keep_master).requires_grad_()
    plain = value(q).requires_grad_()
    x, index = weight(20, 32, seed=1), torch.tensor([3, 3, 7])
    for function in (
        lambda w: (w * x).sum(),
        lambda w: (w.t()[3:9] * 2).exp().clamp(max=9).sum(),
        lambda w: w[index].square().sum(),
        lambda w: torch.softmax(w.view(-1, 8), 1).norm(),
        lambda w: (w.clone() * w.detach()).sum(),
        lambda w: torch.cat([w, w * 3]).mean(),
        lambda w: w.bfloat16().float().sum() + w[2, 5],
        lambda w: F.max_pool1d(w, 3).sum() + w.quantile(0.3, dim=1).sum(),
        lambda w: w.unsqueeze(0).expand(2, -1, -1).std(),
    ):
        grads = [torch.autograd.grad(function(w), w)[0] for w in (q, plain)]
        assert not is_quantized(grads[0])
        assert_same(*grads)
    grad = torch.autograd.grad(ops.dequantize(q).sum(), q)[0]
    assert_same(grad, torch.ones(20, 32))
    source = weight(4, 32).requires_grad_()
    (ops.quantize(source, "float8_blockwise") * 3).sum().backward()
    assert_same(source.grad, torch.full((4, 32), 3.0))


WRITES = {
    "mul_": lambda q: q.mul_(2),
    "view": lambda q: q[3].zero_(),
    "copy_ plain": lambda q: q.copy_(torch.zeros(20, 32)),
    "copy_ quantized": lambda q: q.copy_(ops.quantize(torch.ones(20, 32), "float8_blockwise")),
    "out=": lambda q: torch.add(torch.ones(20, 32), 1, out=q),
    "foreach": lambda q: torch._foreach_mul_([q], 2.0),
    "optimizer, for-loop": lambda q: step(q, foreach=False),
    "optimizer, foreach": lambda q: step(q, foreach=True),
    "optimizer, fused": lambda q: step(q, fused=True),
}


def step(q, **how):
    q.grad = torch.ones(20, 32)
    torch.optim.AdamW([q], **how).step()
    q.grad = None


@pytest.mark.parametrize("write", WRITES)
@keep_or_not
def test_autograd_sees_writes_between_forward_and_backward(write, keep_master):
    q = ops.quantize(weight(20, 32), "float8_blockwise", keep_master=keep_master).requires_grad_()
    x = weight(3, 32).requires_grad_()
    for forward in (lambda: F.linear(x, q), lambda: x[:1] * q):
        version = q._version
        y = forward()
        with torch.no_grad():
            WRITES[write](q)
        assert q._version > version
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        forward().sum().backward()


def test_reads_do_not_count_as_writes():
    q = ops.quantize(weight(20, 32), "float8_blockwise")
    q.mul_(2)
    version = q._version
    ops.flush([q]), ops.codes(q), ops.dequantize(q), q.clone(), q + 1, q.untyped_storage(), q.t()
    assert q._version == version


def test_in_place_on_leaves_and_data():
    q = ops.quantize(weight(20, 32), "float8_blockwise", keep_master=True).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        q.mul_(2)
    q.data.mul_(2)
    assert_same(q, weight(20, 32) * 2)
    other = ops.quantize(weight(20, 32, seed=1), "float8_tensorwise")
    q.data = other
    assert ops.format(q) == "float8_tensorwise" and q.requires_grad
    assert_same(q, other)
    torch.utils.swap_tensors(q, plain := torch.zeros(3))
    assert is_quantized(plain) and not is_quantized(q)


# ------------------------------------------------------------------------------- inference mode


@keep_or_not
def test_inference_mode_keeps_values_and_writes(keep_master):
    q = ops.quantize(weight(20, 32), "float8_blockwise", keep_master=keep_master)
    x = weight(3, 32)
    expected = F.linear(x, q)
    parameter = torch.nn.Parameter(q)
    with torch.inference_mode():
        assert_same(F.linear(x, parameter), expected)
        assert not q[3:5].is_inference() and not q.detach().is_inference()
        q[3:5].mul_(2)
        F.max_pool1d(q, 2), q + 1, q.clone(), q.t() @ torch.ones(20, 1), ops.codes(q)
        made = ops.quantize(weight(4, 32), "float8_blockwise", keep_master=keep_master)
        made.mul_(2)
        assert_same(made[:2], value(made)[:2])
        parameter.mul_(3)
    # What inference mode wrote is an ordinary tensor for training.
    parameter.grad = torch.ones(20, 32)
    torch.optim.AdamW([parameter]).step()
    F.linear(x, parameter).sum().backward()
    assert_same(parameter, q)
    values = value(made).mul_(3)
    assert_same(made.clone().mul_(3), values)
