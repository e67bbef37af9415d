"""qshard.nn's modules over a tensor-parallel mesh: plain local tensors in and out, with the losses and
gradients of one device."""

import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dist_helpers import device, full_mesh, on_ranks, on_worlds
from models.formats import DELAYED, RECIPES
from models.tensor_parallel import varied, write
from test_wgrad_accumulation import added
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import qshard
from qshard._runtime.classes import Process
from qshard.tensor_parallel import collectives, shared

BUDGET_S = 60
ops = torch.ops.qshard
DIM, HIDDEN, TOKENS, STEPS = 256, 512, 8, 2
# For losses, and for gradients by norm. GPUs quantize what each rank multiplies by scales of its own.
TOLERANCE = {"cpu": (1e-4, 2e-3), "cuda": (2e-2, 6e-2)}
FORMATS = ("float8_tensorwise", DELAYED, "float8_blockwise", "mxfp8", "nvfp4")


class Block(nn.Module):
    """down(silu(gate) * up), of tokens first."""

    def __init__(self, dim=DIM, hidden=HIDDEN, split=True, **parallel):
        super().__init__()
        parts = {"gate": hidden, "up": hidden} if split else None
        first = {**parallel, "parallel_mode": "column"} if parallel else {}
        second = {**parallel, "parallel_mode": "row"} if parallel else {}
        self.split = split
        rows = 2 * hidden if split else hidden
        self.up = qshard.nn.LayerNormLinear(
            dim, rows, parameters_split=parts, device=device(), **first
        )
        self.down = qshard.nn.Linear(hidden, dim, device=device(), **second)
    def forward(self, x):
        y = self.up(x)
        if self.split:
            gate, up = y.chunk(2, -1)
            y = F.silu(gate) * up
        else:
            y = F.gelu(y)
        return self.down(y)


@torch.no_grad()
def initialise(block):
    for seed, (name, param) in enumerate(block.named_parameters()):
        if param.dim() == 2:
            write(param, varied(*param.shape, seed).to(device()))
        else:
            base = 1.0 if name.endswith("norm_weight") else 0.0
            write(param, base + torch.linspace(-0.5, 0.5, param.numel(), device=device()))
    return block


def batch(step, dp_rank, dim=DIM):
    generator = torch.Generator().manual_seed(100 * step + dp_rank)
    return torch.randn(TOKENS, 2, dim, generator=generator).to(device())


class Quantized(torch.autograd.Function):
    """On one device, what the gathers of sequence parallelism make of values, in one direction."""

    group = None  # of this rank alone

    @classmethod
    def prepare(cls):
        cls.group = dist.new_subgroups(1)[0].group_name

    @staticmethod
    def forward(ctx, x, format, is_forward):
        ctx.args = format, is_forward
        return rounded(x, format, False) if is_forward else x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        format, is_forward = ctx.args
        return grad if is_forward else rounded(grad, format, True), None, None


def rounded(x, format, is_gradient):
    return ops._gather_tokens(x.contiguous(), 0, format, is_gradient, Quantized.group)


class OneDevice(Block):
    def __init__(self, format, is_rounded, **kwargs):
        super().__init__(**kwargs)
        self.format, self.is_rounded = format, is_rounded

    def forward(self, x):
        if not self.is_rounded:
            return super().forward(x)
        up = self.up
        normed = qshard.nn.parts.norms.normalize(
            x, up.normalization, up.layer_norm_weight, up.layer_norm_bias, up.eps, False
        )
        y = torch.cat(up.project(Quantized.apply(normed, self.format, True), None), -1)
        gate, up = y.chunk(2, -1)
        return Quantized.apply(self.down(F.silu(gate) * up), self.format, False)


def one_device(format, dp_ranks, is_rounded, **sizes):
    """Losses by step and rank, and the gradients of the last step."""
    model = initialise(OneDevice(format, is_rounded, **sizes))
    qshard.quantize_(model, RECIPES[format], filter_fn=lambda *_: True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append([])
        for rank in range(dp_ranks):
            loss = model(batch(step, rank, sizes.get("dim", DIM))).square().mean()
            (loss / dp_ranks).backward()
            losses[-1].append(loss.item())
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    return losses, grads


def train(model, mesh, sequence_parallel, dim=DIM):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    dp_rank, tp_rank = dp_rank_of(mesh), mesh["tp"].get_local_rank()
    ranks, group = mesh["tp"].size(), mesh["tp"].get_group().group_name
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = batch(step, dp_rank, dim)
        if sequence_parallel:
            x = x.chunk(ranks)[tp_rank]
        y = model(x)
        assert type(y) is torch.Tensor and y.shape == x.shape
        loss = y.square().mean()
        if sequence_parallel:
            loss = loss / ranks
        loss.backward()
        total = loss.detach()
        if sequence_parallel and ranks > 1:
            total = collectives.all_reduced(total, group)
        losses.append(total.item())
        grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        optimizer.step()
    return losses, grads


def dp_rank_of(mesh):
    *coordinate, _ = mesh.get_coordinate()
    return coordinate[0] if len(coordinate) == 1 else coordinate[0] * mesh.size(1) + coordinate[1]


def build(format, mesh, sequence_parallel, how="constructor", fsdp=True, **sizes):
    tp_mesh = mesh["tp"]
    if how == "constructor":
        model = Block(sequence_parallel=sequence_parallel, tp_mesh=tp_mesh, **sizes)
    elif how == "group":
        model = Block(sequence_parallel=sequence_parallel, tp_group=tp_mesh.get_group(), **sizes)
    else:
        model = Block(sequence_parallel=sequence_parallel, **sizes)
        for module in (model.up, model.down):
            module.set_device_mesh(tp_mesh)
    initialise(model)
    dp_mesh = mesh[tuple(name for name in mesh.mesh_dim_names if name != "tp")]
    if how == "after":
        fully_shard(model, mesh=dp_mesh)
    qshard.quantize_(model, RECIPES[format], filter_fn=lambda *_: True)
    if fsdp and how != "after":
        fully_shard(model, mesh=dp_mesh)
    return model


def run_training(shape, formats, sequence_parallel, how="constructor", fsdp=True, **sizes):
    mesh = full_mesh(*shape, names=("dp", "tp") if len(shape) == 2 else ("replicate", "dp", "tp"))
    Quantized.prepare()
    for format in formats:
        model = build(format, mesh, sequence_parallel, how, fsdp, **sizes)
        weights = [p for p in model.parameters() if p.dim() == 2]
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert all(map(qshard.is_quantized, weights))
        losses, grads = train(model, mesh, sequence_parallel, sizes.get("dim", DIM))
        dp_ranks, dp_rank = mesh.size() // mesh["tp"].size(), dp_rank_of(mesh)
        want, want_grads = one_device(format, dp_ranks, sequence_parallel, **sizes)
        rtol, largest = TOLERANCE[device().type]
        torch.testing.assert_close(
            torch.tensor(losses), torch.tensor(want)[:, dp_rank], rtol=rtol, atol=0
        )
        assert grads.keys() == want_grads.keys()
        for name, grad in grads.items():
            error = (grad - want_grads[name]).norm() / want_grads[name].norm()
            assert error < largest, (format, name, error)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2)
def test_losses_and_gradients_without_fsdp(sequence_parallel):
    run_training((1, 2), FORMATS, sequence_parallel, "setter", False)


@pytest.mark.parametrize("how", ["constructor", "after"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(4)
def test_losses_and_gradients_under_fsdp(sequence_parallel, how):
    run_training((2, 2), FORMATS[::2], sequence_parallel, how)


@on_ranks(2)
def test_one_tensor_parallel_rank():
    run_training((2, 1), ("float8_tensorwise",), False)


@on_ranks(8, devices=("cpu",))
def test_modules_train_under_hsdp_as_on_one_device():
    run_training((2, 2, 2), ("nvfp4",), True)


@on_worlds(2)
def test_features_that_the_ranks_do_not_divide(world):
    sizes = {"dim": 100, "hidden": 259}
    world.run(run_training, (1, 2), ("float8_tensorwise",), True, "group", False, **sizes)


@on_ranks(2)
def test_layer_norm_mlp():
    """As the two linears that it is made of; computed again in backward, too; and compiled."""
    mesh = full_mesh(names=("tp",))
    rank, ranks = mesh.get_local_rank(), mesh.size()
    x = torch.randn(6, 2, 64, generator=torch.Generator().manual_seed(2)).to(device())
    for sequence_parallel in (False, True):
        options = {"sequence_parallel": sequence_parallel, "tp_mesh": mesh, "device": device()}
        torch.manual_seed(0)
        parts = nn.Sequential(
            qshard.nn.LayerNormLinear(64, 96, parallel_mode="column", **options),
            nn.GELU("tanh"),
            qshard.nn.Linear(96, 64, parallel_mode="row", **options),
        )
        results = []
        for recompute in (None, False, True, "compiled"):
            if recompute is None:
                model, prefixes = parts, {"0.layer_norm": "layer_norm", "0.": "fc1_", "2.": "fc2_"}
            else:
                model, prefixes = qshard.nn.LayerNormMLP(
                    64, 96, set_parallel_mode=True, checkpoint=recompute is True, **options
                ), {}
                model.load_state_dict(state)
            state = {}
            for name, value in model.state_dict().items():
                found = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
                state[prefixes.get(found, "") + name.removeprefix(found)] = value
            qshard.quantize_(model, RECIPES["float8_blockwise"], filter_fn=lambda *_: True)
            given = (x.chunk(ranks)[rank] if sequence_parallel else x).clone().requires_grad_()
            is_compiled = recompute == "compiled"
            run = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
            y = run(given)
            y.square().sum().backward()
            grads = [p.grad.full_tensor() for p in model.parameters()]
            results.append([y.detach(), given.grad, *grads])
        for other in results[1:]:
            for mine, want in zip(other, results[0]):
                torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------ what is shared


@on_ranks(2)
def test_wgrad_is_added_within_the_gemm():
    """wgrad is added within the GEMM to the local part of .grad, to the bits of autograd's sum."""
    mesh = full_mesh(1, 2, names=("dp", "tp"))
    grads = []
    for hooked in (False, True):
        model = build("float8_blockwise", mesh, True, fsdp=False)
        weights = [p for p in model.parameters() if p.dim() == 2]
        if hooked:
            for weight in weights:
                weight.register_hook(lambda grad: None)
        for step in range(3):
            x = batch(step, 0).chunk(2)[mesh["tp"].get_local_rank()]
            loss = model(x).square().mean()
            count = added(loss.backward)
            assert count == (0 if hooked or step == 0 else len(weights)), (hooked, step, count)
        assert all(weight.grad.placements == weight.placements for weight in weights)
        grads.append([weight.grad.to_local().clone() for weight in weights])
    assert all(map(torch.equal, *grads))
    # Chosen gradients are returned, not added.
    loss = model(batch(0, 0).chunk(2)[mesh["tp"].get_local_rank()]).square().mean()
    torch.autograd.grad(loss, weights)
    assert all(torch.equal(w.grad.to_local(), g) for w, g in zip(weights, grads[1]))
    # Under fully_shard, whose parameters are DTensors of their own while they are whole.
    model = build("float8_blockwise", mesh, True)
    model.set_requires_gradient_sync(False)
    for step in range(2):
        loss = model(batch(step, 0).chunk(2)[mesh["tp"].get_local_rank()]).square().mean()
        count = added(loss.backward)
        assert count == step * len(grads[0]), (step, count)


class Attention(nn.Module):
    def __init__(self, mesh, sequence_parallel):
        super().__init__()
        options = {"sequence_parallel": sequence_parallel, "tp_mesh": mesh, "device": device()}
        self.norm = nn.LayerNorm(DIM, device=device())
        for name in "qkv":
            setattr(self, name, qshard.nn.Linear(DIM, DIM, parallel_mode="column", **options))

    def forward(self, x):
        x = self.norm(x)
        return self.q(x) + self.k(x) * self.v(x)


@on_ranks(2)
def test_linears_of_one_input_share_its_gather():
    mesh = full_mesh(names=("tp",))
    for sequence_parallel in (False, True):
        model = Attention(mesh, sequence_parallel)
        qshard.quantize_(model, RECIPES["float8_blockwise"], filter_fn=lambda *_: True)
        made, seen = [], []
        for name in "qkv":
            enter = getattr(model, name).project

            def project(x, *args, linear=getattr(model, name), enter=enter):
                entered = linear._qshard.parallel.enter(x, linear.message_format, ())
                seen.append(entered)
                made.append(Process.shares_input_codes(entered))
                return enter(x, *args)

            getattr(model, name).project = project
        x = batch(0, 0)
        for _ in range(2):
            made.clear(), seen.clear()
            model(x).sum().backward()
            assert made == [True] * 3 and all(tensor is seen[0] for tensor in seen)
        # Nothing is kept beyond backward, nor shared where autograd does not see who writes.
        assert shared.current_slot().last is None
        made.clear(), seen.clear()
        with torch.no_grad():
            model(x)
        assert seen[0] is not seen[1] and shared.current_slot().last is None
        normed = model.norm(x)
        first = model.q._qshard.parallel.enter(normed, "float8_blockwise", ())
        # Nothing refers to the input, which may be swapped. What was made of it goes with it.
        assert shared.current_slot().last is not None
        assert weakref.getweakrefcount(normed) == 0 and not normed.__dict__
        if sequence_parallel:  # else it is a view of the input, and keeps that
            other = torch.zeros_like(normed)
            torch.utils.swap_tensors(normed, other)
            assert model.q._qshard.parallel.enter(other, "float8_blockwise", ()) is first
            del other
            assert shared.current_slot().last is None
            normed = model.norm(x)
            first = model.q._qshard.parallel.enter(normed, "float8_blockwise", ())
        with torch.no_grad():
            normed.mul_(2)
        assert model.q._qshard.parallel.enter(normed, "float8_blockwise", ()) is not first
