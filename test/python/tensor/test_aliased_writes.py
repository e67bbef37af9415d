"""Writes by another name than the tensor's own: memory that an optimizer's kernel writes raw, an
address, NumPy, .data, values of a state_dict, what DCP loads into. Codes follow the value."""

import pytest
import torch
import torch.nn.functional as F
from dist_helpers import device, full_mesh, on_ranks
from helpers import FORMATS, assert_same, fit, ops, quantized_alike, value, weight
from models.formats import recipe_of
from models.weights import check_gathered, full_value, local
from nn_helpers import no_gpu
from program_alias_steps import memory_of
from torch import nn
from torch.distributed.fsdp import fully_shard

import qshard
from qshard._runtime.classes import TensorState

formats = pytest.mark.parametrize("fmt", FORMATS)
keep_or_not = pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
ROWS, COLS = 70, 48


def linear(fmt, keep_master=True, rows=ROWS, seed=0):
    """One quantized linear, on this rank's device."""
    model = nn.Sequential(nn.Linear(COLS, fit(fmt, rows), bias=False)).to(device())
    with torch.no_grad():
        model[0].weight.copy_(weight(fit(fmt, rows), COLS, seed=seed))
    return qshard.quantize_(model, recipe_of(fmt), keep_master=keep_master)


def assert_codes_are_of_the_value(q, note=""):
    """What linears multiply is the quantization of the value."""
    q = q.detach()
    expected = ops.dequantize(quantized_alike(value(q), q, TensorState(q).keeps_master()))
    assert_same(ops.dequantize(q), expected, note)
    x = torch.eye(q.shape[1], dtype=q.dtype, device=q.device)
    assert_same(F.linear(x, q), F.linear(x, expected), note)


# ------------------------------------------ a fused kernel and a raw write in one step()


def fused_adamw(params):
    grads = [p.grad for p in params]
    zeros = [[torch.zeros_like(g) for g in grads] for _ in range(2)]
    steps = [torch.ones((), device=local(p).device) for p in params]
    numbers = dict(lr=0.01, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8)
    torch._fused_adamw_(params, grads, *zeros, [], steps, **numbers, amsgrad=False, maximize=False)


def fused_adam(params):
    grads = [p.grad for p in params]
    zeros = [[torch.zeros_like(g) for g in grads] for _ in range(2)]
    steps = [torch.ones((), device=local(p).device) for p in params]
    numbers = dict(lr=0.01, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8)
    torch._fused_adam_(params, grads, *zeros, [], steps, **numbers, amsgrad=False, maximize=False)


def fused_sgd(params):
    grads = [p.grad for p in params]
    numbers = dict(weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0)
    flags = dict(nesterov=False, maximize=False, is_first_step=True)
    torch._fused_sgd_(params, grads, [], **numbers, **flags)


KERNELS = {
    "_fused_adamw_": fused_adamw,
    "_fused_adam_": fused_adam,
    "_fused_sgd_": fused_sgd,
    "_foreach_add_": lambda ps: torch._foreach_add_(ps, [p.grad for p in ps], alpha=-0.1),
    "add_": lambda params: [p.add_(p.grad, alpha=-0.1) for p in params],
    "none": lambda params: None,
}
RAW = {
    "by address": lambda p: memory_of(local(p).detach()).mul_(-1.5),
    "last value": lambda p: memory_of(local(p).detach()).view(-1)[-1:].fill_(1e3),
    "clamped": lambda p: memory_of(local(p).detach()).clamp_(-1e-2, 1e-2),
    "data": lambda p: local(p).data.mul_(-1.5),
    "master": lambda p: ops.master(local(p).detach()).mul_(-1.5),
    "detached": lambda p: local(p).detach().mul_(-1.5),
}


class RawOptimizer(torch.optim.Optimizer):
    """As an optimizer with a kernel of its own that goes on after one of torch's, or before it."""

    def __init__(self, params, kernel, raw, raw_first=False, only=None):
        super().__init__(params, {})
        self.kernel, self.raw, self.raw_first, self.only = kernel, raw, raw_first, only

    @torch.no_grad()
    def step(self):
        params = [p for group in self.param_groups for p in group["params"]]
        writes = [lambda: KERNELS[self.kernel](params), lambda: self.write_raw(params)]
        for write in reversed(writes) if self.raw_first else writes:
            write()

    def write_raw(self, params):
        for param in params[: self.only]:
            if local(param).numel():
                RAW[self.raw](param)


def with_gradients(params):
    for i, param in enumerate(params):
        param.grad = torch.zeros_like(param)
        local(param.grad).copy_(weight(*local(param).shape, seed=i))
    return params


@pytest.mark.pairwise
@pytest.mark.parametrize("raw_first", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("raw", RAW)
@pytest.mark.parametrize("kernel", KERNELS)
@formats
def test_a_raw_write_in_a_step(fmt, kernel, raw, raw_first):
    models = [linear(fmt, seed=seed) for seed in range(3)]
    plain = [nn.Parameter(value(model[0].weight)) for model in models]
    params = [model[0].weight for model in models]
    for tensors in (params, plain):
        optimizer = RawOptimizer(with_gradients(tensors), kernel, "by address", raw_first)
        optimizer.raw = raw if tensors is params or raw != "master" else "by address"
        for _ in range(2):
            optimizer.step()
    for param, twin in zip(params, plain):
        assert_same(param, twin)
        assert_codes_are_of_the_value(param)


@formats
def test_a_raw_write_of_one_of_a_list(fmt):
    models = [linear(fmt, seed=seed) for seed in range(3)]
    params = with_gradients([model[0].weight for model in models])
    RawOptimizer(params, "_fused_adamw_", "by address", only=1).step()
    for param in params:
        assert_codes_are_of_the_value(param)


EMPTY_WRITES = {
    "fill_": lambda t: t.fill_(8.0),
    "mul_": lambda t: t.mul_(2.0),
    "copy_": lambda t: t.copy_(torch.ones(1, device=t.device)),
    "masked_fill_": lambda t: t.masked_fill_(torch.ones_like(t, dtype=torch.bool), 8.0),
}


@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=no_gpu)])
@pytest.mark.parametrize("write", EMPTY_WRITES)
@pytest.mark.parametrize("through", ["the tensor", ".data"])
@formats
def test_a_write_of_no_elements_hides_no_other_write(fmt, through, write, on):
    """The counter of x.data is its own: the next move of x's counter is another write's."""
    q = ops.quantize(weight(fit(fmt, ROWS), COLS).to(on), fmt, keep_master=True)
    EMPTY_WRITES[write]((q.data if through == ".data" else q)[:, 2:2])
    ops.master(q).zero_()
    assert_codes_are_of_the_value(q)
    assert not ops.dequantize(q).any()


class LookaheadAdamW(torch.optim.AdamW):
    """The fused optimizer itself, whose subclass moves weights in their memory afterwards."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if local(param).numel():
                    memory_of(local(param).detach()).mul_(0.5)


@formats
def test_a_subclass_of_a_fused_optimizer(fmt):
    """Its own step() ends, and is flushed after, within that of the subclass."""
    model = linear(fmt)
    param = model[0].weight
    optimizer = LookaheadAdamW([param], lr=1e-2, fused=True)
    for _ in range(3):
        with_gradients([param])
        optimizer.step()
        assert_codes_are_of_the_value(param)


@pytest.mark.pairwise
@pytest.mark.parametrize("raw", ["by address", "last value", "clamped", "data"])
@pytest.mark.parametrize("kernel", ["_fused_adamw_", "_fused_adam_", "_foreach_add_"])
@pytest.mark.parametrize("rows", [1, 3, 133], ids="{} rows".format)
@formats
@on_ranks(2)
def test_a_raw_write_of_shards_in_a_step(fmt, rows, kernel, raw):
    model = fully_shard(linear(fmt, rows=rows), mesh=full_mesh())
    optimizer = RawOptimizer(list(model.parameters()), kernel, raw)
    for _ in range(2):
        with_gradients(list(model.parameters()))
        optimizer.step()
        assert check_gathered(model, {"0.weight": full_value(model[0].weight)}) == 1
