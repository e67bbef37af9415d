"""Tensor parallelism with what training loops combine it with: losses and gradients are those of one
device, and state dicts of either kind go from mesh to mesh."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dist_helpers import device, full_mesh, on_ranks
from helpers import ops
from models.formats import RECIPES
from models.tensor_parallel import (
    build,
    full_value,
    initialise,
    local,
    local_part,
    mlp,
    replicated,
    sequence_parallel,
)
from models.weights import grid, unsharded
from test_tensor_parallel_training import batch, full_grad
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import qshard
from qshard._runtime.classes import TensorState

BUDGET_S = 75
DIM, HIDDEN = 256, 512
VOCABULARY = 512  # in whole blocks for each of two ranks: others quantize the head's gradients otherwise
NAMES = ("dp", "tp")


def assert_same(got, want, name="", bound=1e-3):
    """Compares gradients relative to their norm: parts are summed in another order."""
    error = (got - want).norm() / want.norm()
    assert error < bound, (name, error.item())


# ----------------------------------------------------------- ways to compute and to update


def steps_of(
    model, mesh, plan, *, dp_ranks=2, recompute=None, microbatches=1, scale_by=(), clip=None
):
    """Losses, all gradients before the last update, and norms. mesh: None for one device, which takes
    the batches of both ranks of dp. scale_by: what rank 0 multiplies the loss of each step with, and
    so do the ranks that have the same loss."""
    mine = range(dp_ranks) if mesh is None else [mesh.get_local_rank("dp")]
    rank = 0 if mesh is None else mine[0] if plan is replicated else dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device(), init_scale=8.0, enabled=bool(scale_by))
    losses, norms = [], []
    for step in range(3):
        optimizer.zero_grad()
        for microbatch in range(microbatches):
            for dp_rank in mine:
                x = batch(10 * step + microbatch, dp_rank)
                if mesh is not None and plan is not replicated:
                    x = x.chunk(2, 1)[mesh.get_local_rank("tp")].contiguous()
                if recompute is None:
                    output = model(x)
                else:
                    output = checkpoint(model, x.requires_grad_(), use_reentrant=recompute)
                loss = output.square().mean()
                loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
                factor = scale_by[step] if scale_by and rank == 0 else 1
                scaled = scaler.scale(loss) * factor / microbatches
                (scaled / len(mine)).backward()
                losses.append(loss.item())
        grads = {name: full_grad(p).clone() for name, p in model.named_parameters()}
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        scaler.step(optimizer)
        scaler.update()
    return losses, grads, norms, scaler.get_scale()


OPTIONS = {
    "checkpointed": dict(recompute=False),
    "checkpointed-reentrant": dict(recompute=True),
    "accumulated": dict(microbatches=2),
    "scaled-inf": dict(scale_by=(1, float("inf"), 1)),
    "clipped": dict(clip=1e-3),
}


# Clipping needs all parameters on one mesh, by torch's rule: the norm's, too.
CASES = [(option, sequence_parallel) for option in OPTIONS]
CASES += [(option, replicated) for option in ("checkpointed", "accumulated", "scaled-inf")]


@pytest.mark.parametrize("option,plan", CASES)
@on_ranks(4)
def test_losses_gradients_and_norms(option, plan):
    """The same losses of this rank's batches, gradients and norms as one device has."""
    mesh, options = full_mesh(2, 2, names=NAMES), OPTIONS[option]
    keep_master = not (option == "accumulated" and plan is replicated)
    model = build("float8_blockwise", mesh, DIM, HIDDEN, plan=plan, keep_master=keep_master)
    losses, grads, norms, scale = steps_of(model, mesh, plan, **options)
    want_model = initialise(mlp(DIM, HIDDEN))
    qshard.quantize_(want_model, RECIPES["float8_blockwise"], keep_master=keep_master)
    want, want_grads, want_norms, want_scale = steps_of(want_model, None, plan, **options)
    want = torch.tensor(want).view(-1, 2)[:, mesh.get_local_rank("dp")]
    torch.testing.assert_close(torch.tensor(losses), want, rtol=1e-4, atol=0)
    assert scale == want_scale == (4.0 if option == "scaled-inf" else scale)
    for name, grad in grads.items():
        assert_same(grad, want_grads[name], name)
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(want_norms), rtol=1e-4, atol=0)


def run_compiled(backend, format):
    """Blocks, before fully_shard."""
    dp_ranks = dist.get_world_size() // 2
    mesh = full_mesh(dp_ranks, 2, names=NAMES)
    model = build(format, mesh, DIM, HIDDEN, plan=sequence_parallel, order="pq")
    model.compile(fullgraph=True, backend=backend)
    fully_shard(model, mesh=mesh["dp"])
    losses, grads, *_ = steps_of(model, mesh, sequence_parallel)
    want_model = qshard.quantize_(initialise(mlp(DIM, HIDDEN)), RECIPES[format])
    want, want_grads, *_ = steps_of(want_model, None, sequence_parallel, dp_ranks=dp_ranks)
    want = torch.tensor(want).view(-1, dp_ranks)[:, mesh.get_local_rank("dp")]
    torch.testing.assert_close(torch.tensor(losses), want, rtol=1e-4, atol=0)
    for name, grad in grads.items():
        assert_same(grad, want_grads[name], name)


@on_ranks(4, devices=("cpu",))
def test_compiled_blocks_train_as_eager_ones():
    run_compiled("aot_eager", "float8_blockwise")


@on_ranks(2, devices=("cuda",))
def test_blocks_compiled_by_inductor():
    run_compiled("inductor", "float8_blockwise")


# ------------------------------------------------------------------------------------ models


class Scaled(nn.Linear):
    """A user's own linear: quantize_ replaces its weight, not it."""

    def forward(self, x):
        return super().forward(x) * 0.5


class LanguageModel(nn.Module):
    def __init__(self, is_tied, linear=nn.Linear, vocabulary=VOCABULARY, dim=DIM):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.norm = nn.LayerNorm(dim)
        self.mix = linear(dim, dim, bias=False)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.tie(is_tied)

    def tie(self, is_tied):
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.mix(self.norm(self.embedding(tokens))))


def language_model(is_tied, linear, mesh):
    torch.manual_seed(0)
    model = LanguageModel(is_tied, linear).to(device())
    if mesh is not None:
        plan = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "mix": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        parallelize_module(model, mesh["tp"], plan)
        model.tie(is_tied)  # parallelize_module makes two parameters of one
    names = ("mix",) if is_tied else ("mix", "head")
    qshard.quantize_(
        model,
        qshard.Float8BlockScaling(),
        filter_fn=lambda module, name: name in names,
        tp_mesh=mesh["tp"] if mesh is not None else None,
    )
    if mesh is not None:
        fully_shard(model, mesh=mesh["dp"])
    return model


def run_language_model(is_tied, linear):
    """With loss_parallel over the logits that are cut by vocabulary."""
    mesh = full_mesh(2, 2, names=NAMES)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (2, 2, 8), generator=generator).to(device())
    seen = []
    for each in (mesh, None):
        model = language_model(is_tied, linear, each)
        assert type(model.mix) is (linear if linear is not nn.Linear else qshard.nn.Linear)
        assert len(list(model.parameters())) == (4 if is_tied else 5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            for dp_rank in range(2) if each is None else [mesh.get_local_rank("dp")]:
                x = tokens[dp_rank]
                with loss_parallel() if each is not None else contextlib.nullcontext():
                    loss = F.cross_entropy(model(x).flatten(0, 1), x.roll(1, 1).flatten())
                    (loss / (2 if each is None else 1)).backward()
                losses.append((loss.full_tensor() if isinstance(loss, DTensor) else loss).item())
            grads = {name: full_grad(p).clone() for name, p in model.named_parameters()}
            optimizer.step()
        seen.append((losses, grads))
    (losses, grads), (want, want_grads) = seen
    want = torch.tensor(want).view(-1, 2)[:, mesh.get_local_rank("dp")]
    # Over DTensors a stock linear's wgrad is an mm of values. On one GPU it multiplies codes.
    has_codes = device().type == "cuda" and linear is not nn.Linear
    rtol, bound = (1e-3, 0.05) if has_codes else (1e-4, 1e-3)
    torch.testing.assert_close(torch.tensor(losses), want, rtol=rtol, atol=0)
    for name, grad in grads.items():
        assert_same(grad, want_grads[name], name, bound)


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@on_ranks(4)
def test_embedding_head_and_loss_parallel(is_tied):
    run_language_model(is_tied, nn.Linear)


@on_ranks(4)
def test_a_subclass_of_linear():
    run_language_model(False, Scaled)


# -------------------------------------------------------------- empty shards and state dicts


def train_steps(model, mesh, dim, first=0, steps=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, continue_steps(model, optimizer, mesh, dim, first, steps)


def continue_steps(model, optimizer, mesh, dim, first, steps):
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = model(batch(step, 0, dim)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("format", ["float8_tensorwise", "mxfp8"])
@on_ranks(8)
def test_ranks_without_rows_train_along(format):
    """Ranks of FSDP2 that hold no rows: two rows of each tensor-parallel part, over four."""
    mesh = full_mesh(4, 2, names=NAMES)
    dim, hidden = 2, 4
    model = build(format, mesh, dim, hidden)
    for linear in (model.up, model.down):
        assert (local(linear.weight).numel() == 0) == (mesh.get_local_rank("dp") >= 2)
    want = initialise(mlp(dim, hidden))
    qshard.quantize_(want, RECIPES[format])
    losses = train_steps(model, mesh, dim)[1]
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor(train_steps(want, None, dim)[1]), rtol=1e-4, atol=1e-6
    )
    for param, other in zip(model.parameters(), want.parameters()):
        mine = local(param.grad)
        torch.testing.assert_close(mine, local_part(other.grad, param), rtol=1e-4, atol=1e-6)


def states(model):
    """Codes, scales and all state, gathered over FSDP2."""
    with unsharded(model):
        found = []
        for linear in (model.up, model.down):
            weight = local(linear.weight)
            found += [ops.codes(weight).view(torch.uint8).clone(), grid(weight).float().clone()]
            found += [t.clone() for t in TensorState(weight).scaling_state().values()]
    return found


def moments_of(param, optimizer):
    return [value.full_tensor() for value in optimizer.state[param].values() if value.dim()]


FULL = {"full_state_dict": True}
WAYS = {  # options to save with, and to load with
    "sharded": ({}, {}),
    "full": (FULL, FULL),
    "from-rank-0": ({**FULL, "cpu_offload": True}, {**FULL, "broadcast_from_rank0": True}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("format", ["float8_delayed[history=3]", "float8_blockwise", "nvfp4"])
@on_ranks(4)
def test_state_dicts_of_model_and_optimizer(format, way):
    """Model and optimizer are saved and loaded: training goes on bit for bit."""
    mesh = full_mesh(2, 2, names=NAMES)
    dim, hidden = 96, 160
    model = build(format, mesh, dim, hidden)
    optimizer, _ = train_steps(model, mesh, dim)
    saved_as, loaded_as = (StateDictOptions(**options) for options in WAYS[way])
    state, optimizer_state = get_state_dict(model, optimizer, options=saved_as)
    optimizer_state = copy.deepcopy(optimizer_state)  # torch loads the tensors themselves
    if way == "from-rank-0" and dist.get_rank() != 0:
        state, optimizer_state = {}, {}
    other = build(format, mesh, dim, hidden, order="pfq" if way == "sharded" else "meta-pfq")
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(-3)
    resumed = torch.optim.AdamW(other.parameters(), lr=1e-2)
    # torch's set_state_dict takes an empty dict for none, and leaves rank 0 waiting.
    set_model_state_dict(other, state, options=loaded_as)
    set_optimizer_state_dict(other, resumed, optimizer_state, options=loaded_as)
    qshard.flush(other)
    for name in ("up", "down"):
        values = [full_value(getattr(each, name).weight) for each in (model, other)]
        assert torch.equal(*values), name
    assert all(map(torch.equal, states(model), states(other)))
    pairs = ((model, optimizer), (other, resumed))
    mine, want = (moments_of(each.up.weight, opt) for each, opt in pairs)
    assert len(mine) == 2 and all(map(torch.equal, mine, want))
    losses = [continue_steps(*pair, mesh, dim, 2, 1) for pair in pairs]
    assert losses[0] == losses[1]
    assert all(map(torch.equal, states(model), states(other)))
