"""Backwards that add to a weight's .grad, beside hooks and modes that look on."""

import pytest
import torch
import torch.nn.functional as F
from test_wgrad_accumulation import (
    COLS,
    ROWS,
    TOKENS,
    added,
    assert_sum,
    backward,
    batches,
    device,  # noqa: F401
    gradient_of,
    ops,
    parameter,
)
from torch.utils.flop_counter import FlopCounterMode


def test_tensor_hooks_see_the_part_of_each_backward(device):
    q = parameter(device)
    q.grad = torch.ones(q.shape, device=device)
    x, gradient = batches(q, 1)[0]
    part = gradient_of(q, x, gradient)
    seen = []
    q.register_hook(lambda grad: seen.append(grad.clone()) or 2 * grad)
    assert added(lambda: backward(q, x, gradient)) == 0
    assert torch.equal(seen[0], part)
    assert_sum(q.grad, [torch.ones_like(part), part, part])


def test_post_accumulate_grad_hooks(device):
    q = parameter(device)
    x, gradient = batches(q, 1)[0]
    part = gradient_of(q, x, gradient)
    seen = []
    q.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for count in (1, 2, 3):
        assert added(lambda: backward(q, x, gradient)) == 0
        assert len(seen) == count
        assert_sum(seen[-1], [part] * count)


@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
@pytest.mark.parametrize("of_leaf", [False, True], ids=["linear", "leaf"])
def test_node_hooks_see_the_part_of_each_backward(device, register, of_leaf):
    q = parameter(device)
    q.grad = torch.ones(q.shape, device=device)
    x, gradient = batches(q, 1)[0]
    part = gradient_of(q, x, gradient)
    y, seen = F.linear(x, q), []
    node = torch.autograd.graph.get_gradient_edge(q).node if of_leaf else y.grad_fn
    getattr(node, register)(lambda *grads: seen.append(grads) and None)
    y.backward(gradient)
    assert_sum(q.grad, [torch.ones_like(part), part])
    if of_leaf:
        assert torch.equal(seen[0][-1][0], part)
    elif register == "register_hook":
        assert torch.equal(seen[0][0][1], part)


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected")
def test_anomaly_mode_sees_the_gradient(device):
    q = parameter(device)
    q.grad = torch.ones(q.shape, device=device)
    x, gradient = batches(q, 1)[0]
    with torch.no_grad():
        x[0, 0] = torch.nan
    with (
        torch.autograd.detect_anomaly(),
        pytest.raises(RuntimeError, match="returned nan values in its 1th output"),
    ):
        backward(q, x, gradient)


def test_dispatch_modes_see_an_ordinary_backward(device):
    q = parameter(device)
    x, gradient = batches(q, 1)[0]
    with FlopCounterMode(display=False) as counter:
        for _ in range(2):
            assert added(lambda: backward(q, x, gradient)) == 0
    assert counter.get_total_flops() == 2 * 3 * 2 * TOKENS * ROWS * COLS


def test_flops_of_the_operators():
    q = parameter("cpu").detach()
    x, gradient, total = torch.randn(TOKENS, COLS), torch.randn(TOKENS, ROWS), torch.zeros(q.shape)
    flops = 2 * TOKENS * ROWS * COLS
    for needs_input in (False, True):
        for weight_only in (False, True):
            with FlopCounterMode(display=False) as counter:
                ops.linear_backward(gradient, q, x, False, needs_input, True, weight_only)
            assert counter.get_total_flops() == (1 + needs_input) * flops
            with FlopCounterMode(display=False) as counter:
                ops.linear_backward_accumulate(
                    gradient, q, x, False, needs_input, total, weight_only
                )
            assert counter.get_total_flops() == (1 + needs_input) * flops


def test_operator_names_what_it_cannot_add_to():
    q = parameter("cpu").detach()
    x, gradient = torch.randn(TOKENS, COLS), torch.randn(TOKENS, ROWS)
    for total, error in (
        (torch.zeros(COLS, ROWS), r"contiguous Float tensor of \(64, 48\)"),
        (torch.zeros(COLS, ROWS).t(), "contiguous Float tensor"),
        (torch.zeros(q.shape, dtype=torch.float64), "plain float32, bfloat16 or float16"),
        (q.clone(), "must be a plain"),
    ):
        with pytest.raises(RuntimeError, match=error):
            ops.linear_backward_accumulate(gradient, q, x, False, True, total)
