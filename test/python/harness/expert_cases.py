"""Stacks of matrices and groups of rows for the tests of experts."""

import torch
import torch.nn.functional as F
from helpers import ops

EMPTY = ("none", "first", "middle", "last", "all")
NAN = float("nan")


def ends_of(count, empty):
    generator = torch.Generator().manual_seed(count)
    rows = torch.randint(1, 10, (count,), generator=generator)
    where = {"first": 0, "middle": count // 2, "last": -1, "all": slice(None)}
    if empty in where:
        rows[where[empty]] = 0
    return rows.cumsum(0).int()


def parts(ends, total=None):
    """The rows of each expert, from `ends` that may be any."""
    begin = 0
    for end in ends.tolist():
        end = max(begin, min(end, total if total is not None else end))
        yield slice(begin, end)
        begin = end


def stack_of(count, rows, columns, format, device="cpu", dtype=torch.float32, base=4.0):
    """Two alike, whose matrices have amaxes of their own."""
    values = torch.randn(count, rows, columns, generator=torch.Generator().manual_seed(count))
    values *= (base ** (torch.arange(count) % 8 - 4))[:, None, None]
    values = values.to(device, dtype)
    return [ops.quantize(values, format).requires_grad_() for _ in "ab"]


def rows_of(ends, columns, tail, device, dtype, seed, base=4.0):
    """Values of experts with amaxes of their own, and NaNs behind them."""
    total = int(ends[-1])
    x = torch.randn(total + tail, columns, generator=torch.Generator().manual_seed(seed))
    for e, rows in enumerate(parts(ends)):
        x[rows] *= base ** (e % 8 - 4)
    x[total:] = NAN
    return x.to(device, dtype)


def fill_freed_memory(*likes):
    """With NaNs, for what is allocated next."""
    for like in likes:
        for _ in range(3):
            torch.full_like(like, NAN)


def by_linears(x, stack, ends, grad, product=F.linear):
    """Output, and the gradients of x and the stack, of one linear after the other."""
    x = x.clone().requires_grad_()
    output = torch.zeros(len(x), grad.shape[1], dtype=x.dtype, device=x.device)
    gradient = torch.zeros_like(x)
    for e, rows in enumerate(parts(ends, len(x))):
        own = x[rows].detach().requires_grad_()
        y = product(own, stack[e])
        output[rows] = y.detach()
        if len(own):
            y.backward(grad[rows])
            gradient[rows] = own.grad
    return output, gradient
