"""qshard's styles of parallelize_module: torch's, with gathers that move codes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from dist_helpers import device, full_mesh, on_ranks, on_worlds
from models.blocks import MLP
from models.formats import DELAYED, RECIPES
from models.tensor_parallel import initialise, mlp
from collective_calls import Sent
from test_tensor_parallel_modules import TOLERANCE, Quantized
from test_tensor_parallel_training import batch, full_grad
from test_tensor_parallel_values import refused
from test_wgrad_accumulation import added
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module, style

import qshard
from qshard._runtime.classes import Process
from qshard.tensor_parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, stock

BUDGET_S = 60
DIM, HIDDEN, STEPS = 256, 512, 2
FORMATS = ("float8_tensorwise", DELAYED, "float8_blockwise", "mxfp8", "nvfp4")


# by styles of qshard's own; those of models.tensor_parallel have the same names, and are torch's
def replicated():
    return {"up": ColwiseParallel(), "down": RowwiseParallel()}


def sequence_parallel():
    return {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }


class RoundedMLP(MLP):
    """On one device, what gathers of codes make of values."""

    format = None

    def forward(self, x):
        x = Quantized.apply(self.norm(x), self.format, True)
        return Quantized.apply(self.down(F.gelu(self.up(x))), self.format, False)


def one_device(format, dp_ranks, is_rounded, dim, hidden):
    model = initialise(mlp(dim, hidden))
    if is_rounded:
        model.__class__, model.format = RoundedMLP, format
    qshard.quantize_(model, RECIPES[format])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append([])
        for rank in range(dp_ranks):
            loss = model(batch(step, rank, dim)).square().mean()
            (loss / dp_ranks).backward()
            losses[-1].append(loss.item())
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    return losses, grads


def train(model, mesh, is_cut, dim):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    dp_rank, tp_rank = mesh.get_coordinate()
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = batch(step, dp_rank, dim)
        x = x.chunk(mesh["tp"].size(), 1)[tp_rank].contiguous() if is_cut else x
        loss = model(x).square().mean()
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        loss.backward()
        losses.append(loss.item())
        grads = {name: full_grad(p) for name, p in model.named_parameters()}
        optimizer.step()
    return losses, grads


def run_training(shape, formats, plan, order="pq", dim=DIM, hidden=HIDDEN):
    mesh = full_mesh(*shape, names=("dp", "tp"))
    Quantized.prepare()
    is_cut, dp_rank = plan is sequence_parallel, mesh.get_coordinate()[0]
    for format in formats:
        model = initialise(mlp(dim, hidden))
        for step in order:
            if step == "p":
                parallelize_module(model, mesh["tp"], plan())
            elif step == "q":
                qshard.quantize_(model, RECIPES[format])  # the styles say which mesh is whose
            else:
                fully_shard(model, mesh=mesh["dp"])
        losses, grads = train(model, mesh, is_cut, dim)
        want, want_grads = one_device(format, shape[0], is_cut, dim, hidden)
        rtol, largest = TOLERANCE[device().type]
        torch.testing.assert_close(
            torch.tensor(losses), torch.tensor(want)[:, dp_rank], rtol=rtol, atol=0
        )
        for name, grad in grads.items():
            error = (grad - want_grads[name]).norm() / want_grads[name].norm()
            assert error < largest, (format, name, error)


@pytest.mark.parametrize("plan", [replicated, sequence_parallel])
@on_ranks(2)
def test_losses_and_gradients_without_fsdp(plan):
    run_training((1, 2), FORMATS, plan)


@pytest.mark.parametrize("order", ["pqf", "pfq"])
@on_ranks(4)
def test_losses_and_gradients_under_fsdp(order):
    run_training((2, 2), FORMATS[:3:2], sequence_parallel, order)


@on_worlds(2)
def test_features_that_the_ranks_do_not_divide(world):
    for plan in (replicated, sequence_parallel):
        world.run(run_training, (1, 2), ("float8_tensorwise",), plan, "pq", 100, 259)


# ------------------------------------------------------------------------------ q, k and v


class Attention(nn.Module):
    def __init__(self, dim=DIM):
        super().__init__()
        for name in "qkvo":
            setattr(self, name, nn.Linear(dim, dim, bias=False))

    def forward(self, x):
        return self.o(torch.tanh(self.q(x)) * self.k(x) + self.v(x))


class Layer(nn.Module):
    def __init__(self, dim=DIM):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = Attention(dim)

    def forward(self, x):
        return self.attention(self.norm(x))


def prepared(use_local_output):
    out = {"attention.o": RowwiseParallel(output_layouts=Shard(1))}
    if use_local_output is None:
        column = {f"attention.{name}": ColwiseParallel(input_layouts=Shard(1)) for name in "qkv"}
        return {**column, **out}
    module = PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=use_local_output
    )
    return {
        "attention": module,
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        **out,
    }


@on_ranks(2)
def test_three_linears_share_one_gather():
    """For three linears, in each of the ways to write it, with the same output and gradients; their
    wgrads go into the GEMM."""
    mesh = full_mesh(names=("tp",))
    Quantized.prepare()
    rank, ranks = mesh.get_local_rank(), mesh.size()
    torch.manual_seed(0)
    first = Layer().to(device())
    whole = batch(0, 0)
    x = whole.chunk(ranks, 1)[rank].contiguous()
    message = [(torch.uint8, x.numel() * 132 // 128)]  # fp32 scales of 1x128
    results = []
    # (An input of PrepareModuleInput whose local part is given out counts gradients as whole ones.)
    for use_local_output in (None, False):
        model = copy.deepcopy(first)
        parallelize_module(model, mesh, prepared(use_local_output))
        qshard.quantize_(model, RECIPES["float8_blockwise"])
        given = x.clone().requires_grad_()
        with Sent() as sent:
            y = model(given)
        assert sent.gathered == message, (use_local_output, sent.gathered)
        with Sent() as sent:
            y.square().sum().backward()
        assert sent.gathered == message, (use_local_output, sent.gathered)
        key = model.attention.k.weight.grad.to_local()
        results.append((y.detach(), given.grad.clone(), key.clone()))
        loss = model(given).square().sum()
        assert added(loss.backward) == 4
    for mine, other in zip(*results):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    plain = copy.deepcopy(first)
    qshard.quantize_(plain, RECIPES["float8_blockwise"])
    whole.requires_grad_()
    normed = Quantized.apply(plain.norm(whole), "float8_blockwise", True)
    y = Quantized.apply(plain.attention(normed), "float8_blockwise", False)
    y.square().sum().backward()
    want = (
        y.chunk(ranks, 1)[rank],
        whole.grad.chunk(ranks, 1)[rank],
        plain.attention.k.weight.grad.chunk(ranks)[rank],
    )
    for mine, other in zip(results[0], want):
        assert (mine - other).norm() < 1e-3 * other.norm()


@on_ranks(2)
def test_three_linears_share_one_gather_when_compiled():
    """Linears of one input, in each of the ways to write it: gradients are those of eager mode."""
    mesh = full_mesh(names=("tp",))
    torch.manual_seed(0)
    first = Layer().to(device())
    x = batch(0, 0).chunk(mesh.size(), 1)[mesh.get_local_rank()].contiguous()
    for use_local_output in (None, True, False):
        results = []
        for is_compiled in (False, True):
            model = copy.deepcopy(first)
            parallelize_module(model, mesh, prepared(use_local_output))
            qshard.quantize_(model, RECIPES["float8_tensorwise"])
            given = x.clone().requires_grad_()
            called = torch.compile(model, backend="aot_eager") if is_compiled else model
            called(given).square().sum().backward()
            results.append([given.grad, *(full_grad(p) for p in model.parameters())])
        for mine, other in zip(*results):
            assert (mine - other).norm() < 1e-3 * other.norm(), use_local_output


@on_ranks(2)
def test_linears_of_torchs_styles_share_their_input():
    """torch's styles: linears called with one DTensor take one local tensor of it."""
    mesh = full_mesh(names=("tp",))
    model = Layer().to(device())
    plan = {
        "attention": style.PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=False
        ),
        **{f"attention.{name}": style.ColwiseParallel() for name in "qkv"},
        "attention.o": style.RowwiseParallel(),
    }
    parallelize_module(model, mesh, plan)
    qshard.quantize_(model, RECIPES["float8_blockwise"], tp_mesh=mesh)
    inputs, linear = [], stock._linear
    try:
        stock._linear = lambda x, *args, **kwargs: inputs.append(x) or linear(x, *args, **kwargs)
        for step in range(3):
            inputs.clear()
            x = batch(step, 0).chunk(mesh.size(), 1)[mesh.get_local_rank()].contiguous()
            loss = model(x).square().sum()
            assert all(x is inputs[0] for x in inputs[:3]) and len(inputs) == 4
            assert all(map(Process.shares_input_codes, inputs[:3]))
            assert added(loss.backward) == (4 if step else 0)
    finally:
        stock._linear = linear


# ---------------------------------------------------------------------------------- others


def full_grad_of(model, x):
    model.zero_grad()
    model(x).to_local().square().sum().backward()
    return [full_grad(p).clone() for p in model.parameters()]


@on_ranks(2)
def test_other_modules_and_layouts():
    mesh = full_mesh(names=("tp",))
    rank, ranks = mesh.get_local_rank(), mesh.size()
    x = batch(0, 0)
    cut = x.chunk(ranks, 1)[rank].contiguous()
    want = initialise(mlp(DIM, HIDDEN))
    # Modules that stay plain, and those that multiply values, gather values.
    model = parallelize_module(initialise(mlp(DIM, HIDDEN)), mesh, sequence_parallel())
    torch.testing.assert_close(model(cut).full_tensor(), want(x))
    qshard.quantize_(model, RECIPES["mxfp8"], filter_fn=lambda module, name: name == "up")
    qshard.quantize_(want, RECIPES["mxfp8"], filter_fn=lambda module, name: name == "up")
    with Sent() as sent:
        model(cut)
    assert [dtype for dtype, _ in sent.gathered] == [torch.uint8]
    model = parallelize_module(initialise(mlp(DIM, HIDDEN)), mesh, sequence_parallel())
    want = initialise(mlp(DIM, HIDDEN))
    for each in (model, want):
        qshard.quantize_(each, RECIPES["mxfp8"], weight_only=True)
    with Sent() as sent:
        y = model(cut).full_tensor()
    assert {dtype for dtype, _ in sent.gathered} == {torch.float32}
    torch.testing.assert_close(y, want(x))
    # Outputs of other layouts.
    plan = {
        "up": ColwiseParallel(output_layouts=Replicate()),
        "down": RowwiseParallel(input_layouts=Replicate(), use_local_output=False),
    }
    for hidden in (HIDDEN, 259):
        model = parallelize_module(initialise(mlp(DIM, hidden)), mesh, plan)
        want = initialise(mlp(DIM, hidden))
        for each in (model, want):
            # By values: FP8 GEMMs would scale each rank's part of `down`'s input by itself.
            qshard.quantize_(each, RECIPES["float8_tensorwise"], weight_only=True)
        torch.testing.assert_close(model(x).full_tensor(), want(x), rtol=1e-4, atol=1e-4)
    model = parallelize_module(initialise(mlp(DIM, HIDDEN)), mesh, sequence_parallel())
    qshard.quantize_(model, RECIPES["mxfp8"])
    odd = DTensor.from_local(
        torch.ones(2, 3 - rank, DIM, device=device()), mesh, (Shard(1),), shape=(2, 5, DIM),
        stride=(5 * DIM, DIM, 1), run_check=False,
    )  # fmt: skip
    whole = full_grad_of(model, cut)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for mine, other in zip(full_grad_of(compiled, cut), whole):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    with refused(ValueError, "ColwiseParallel: dimension 1 of an input .* no multiple of the 2 ranks"):
        model.up(odd)
    with refused(ValueError, "cuts dimension 1 of an output of shape .* into 2 equal parts"):
        model.down(torch.ones(2, 5, HIDDEN // 2, device=device()))
