"""Operators that add to a gradient where they are given one, in compiled code."""

import pytest
import torch

ops = torch.ops.qshard
ROWS, COLUMNS, TOKENS = 64, 48, 8
X, GRAD = torch.randn(TOKENS, COLUMNS), torch.randn(TOKENS, ROWS)
INNER = torch.randn(TOKENS, COLUMNS)


def by_operator(q, weight_grad, input_sum):
    return ops.linear_backward(
        GRAD, q, X, False, True, True, input_sum=input_sum, weight_grad=weight_grad
    )


def by_another_name(q, weight_grad, input_sum):
    made = ops.linear_backward_accumulate(GRAD, q, X, False, True, weight_grad)
    input_sum.add_(made)
    return made.new_empty(0), made.new_empty(0)


def of_swiglu(q, weight_grad, input_sum):
    maxima = torch.empty(0)
    made = ops.swiglu_linear_backward(
        GRAD, X, INNER, q, maxima, True, True, True, False, weight_grad=weight_grad
    )
    input_sum.add_(made[1])
    return made[0], made[3]


def of_swiglu_by_another_name(q, weight_grad, input_sum):
    maxima = torch.empty(0)
    made = ops.swiglu_linear_backward_accumulate(
        GRAD, X, INNER, q, maxima, weight_grad, True, True, False
    )
    input_sum.add_(made[0])
    return GRAD.new_empty(0), made[2]


CALLS = {f.__name__: f for f in (by_operator, by_another_name, of_swiglu, of_swiglu_by_another_name)}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", CALLS)
def test_a_graph_adds_in_place(name, backend):
    call = CALLS[name]
    q = ops.quantize(torch.randn(ROWS, COLUMNS), "float8_blockwise")
    main_grad, input_sum = torch.randn(ROWS, COLUMNS), torch.randn(TOKENS, COLUMNS)
    expected = main_grad.clone(), input_sum.clone()
    results = call(q, *expected)
    torch._dynamo.reset()
    compiled = torch.compile(call, backend=backend, fullgraph=True)(q, main_grad, input_sum)
    assert all(torch.equal(a, b) for a, b in zip(compiled, results))
    assert torch.equal(main_grad, expected[0]) and torch.equal(input_sum, expected[1])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_backwards_add_to_a_grad_that_is_there(backend):
    torch._dynamo.reset()
    weights = torch.randn(ROWS, COLUMNS)
    gradients = []
    for run in (ops.linear, torch.compile(ops.linear, backend=backend, fullgraph=True)):
        q = ops.quantize(weights, "float8_blockwise").requires_grad_()
        q.grad = torch.ones(ROWS, COLUMNS)
        x = X.clone().requires_grad_()
        for _ in range(2):
            run(x, q).backward(GRAD)
        gradients.append((q.grad, x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_compiled_autograd_lifts_what_functions_keep():
    def loss(x, q, bias, cos, sin):
        heads = ops.rotary_embedding(ops.linear(x, q, bias).view(1, TOKENS, 4, 16), cos, sin)
        return heads.square().sum()

    weights, table = torch.randn(ROWS, COLUMNS), torch.randn(TOKENS, 8)
    gradients = []
    for is_compiled in (False, True):
        q = ops.quantize(weights, "float8_blockwise").requires_grad_()
        x, bias = X.clone().requires_grad_(), torch.zeros(ROWS, requires_grad=True)
        value = loss(x, q, bias, table.cos(), table.sin())
        if is_compiled:
            from torch._dynamo import compiled_autograd

            compiler = torch.compile(backend="eager")
            with compiled_autograd._enable(compiler):
                value.backward()
        else:
            value.backward()
        gradients.append((x.grad, q.grad, bias.grad))
    assert all(torch.equal(a, b) for a, b in zip(*gradients))
