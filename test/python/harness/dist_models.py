"""Models, training runs and ways to look at weights, for the distributed tests."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dist_helpers import device, full_mesh
from helpers import fit, has_two_images, quantized_alike, shown_to_dgrad
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import qshard
from qshard.formats import info_of

ops = torch.ops.qshard

RECIPES = {
    recipe.format: recipe
    for recipe in (
        qshard.Float8CurrentScaling(),
        qshard.DelayedScaling(amax_history_len=3),  # fewer than the steps of a test
        qshard.Float8BlockScaling(),
        qshard.MXFP8BlockScaling(),
        qshard.MXFP8BlockScaling(weight_block=(1, 32)),
        qshard.MXFP8BlockScaling(weight_block=(1, 32), gather="phase"),
        qshard.NVFP4BlockScaling(),
        qshard.NVFP4BlockScaling(disable_2d_quantization=True),
    )
}
FORMATS = tuple(format for format in RECIPES if format != "mxfp8_1x32[phase]")
DELAYED = "float8_delayed[history=3]"
# Models of several formats at once; each format is in one of them at least.
MIXES = {
    "mix-1": {
        "blocks.0.up": "float8_tensorwise",
        "blocks.0.down": DELAYED,
        "blocks.1.up": "mxfp8_1x32",
        "blocks.1.down": "nvfp4",
        "head": "mxfp8",
    },
    "mix-2": {
        "blocks.0.up": "nvfp4",
        "blocks.0.down": "mxfp8",
        "blocks.1.up": "float8_blockwise",
        "blocks.1.down": DELAYED,
        "head": "nvfp4_1x16",
    },
}
WIDTH = 100  # not a multiple of 16, nor of a block


# --------------------------------------------------------------------------------- models


class Block(nn.Module):
    """An MLP block: quantized weights, plain norm and bias in one FSDP group."""

    def __init__(self, rows, linear=nn.Linear, recompute=None):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = linear(WIDTH, rows, bias=False)
        self.down = linear(rows, WIDTH)
        self.recompute = recompute  # None, or use_reentrant of activation checkpointing

    def forward(self, x):
        if self.recompute is None:
            return self.mlp(x)
        return checkpoint(self.mlp, x, use_reentrant=self.recompute)

    def mlp(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """`format`: the rows of `up` are rounded up to what it can have."""

    def __init__(self, rows=257, linear=nn.Linear, recompute=None, format=None):
        super().__init__()
        fitted = [fit(format_of(format, f"blocks.{i}.up") if format else "", rows) for i in range(2)]
        self.blocks = nn.ModuleList(Block(n, linear, recompute) for n in fitted)
        self.head = linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def format_of(format, name):
    """The format of a module or weight in a model of one format or a mix."""
    module = name.removesuffix(".weight")
    if has_two_images(format) and not module.endswith("up"):
        return "mxfp8"  # WIDTH rows do not fit
    return MIXES[format][module] if format in MIXES else format


def quantize_model(model, format, **kwargs):
    """qshard.quantize_ with one format or a mix."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for fmt in sorted({format_of(format, name) for name in linears}):
        chosen = lambda _, name, fmt=fmt: format_of(format, name) == fmt  # noqa: E731
        qshard.quantize_(model, RECIPES[fmt], filter_fn=chosen, **kwargs)
    return model


def shard(model, mesh=None, **kwargs):
    """fully_shard per block and for the rest, as one does."""
    mesh = mesh or full_mesh()
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def build(format, *, rows=257, keep_master=True, recompute=None, prepare=None, **kwargs):
    """A quantized, sharded Model; `prepare(model)` runs in between."""
    torch.manual_seed(0)
    model = Model(rows, recompute=recompute, format=format).to(device())
    quantize_model(model, format, keep_master=keep_master)
    if prepare:
        prepare(model)
    return shard(model, **kwargs)


class _Show(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, quantized):
        return ops.dequantize(quantized)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Shadow:
    """shadow(weight): what forward and backward would see of a plain weight if it were quantized;
    its gradient passes through. A new value is one that an optimizer step made."""

    def __init__(self, format):
        self.format = format
        self.quantized = None

    def __call__(self, weight):
        value = weight.detach()
        if self.quantized is None:
            self.quantized = ops.quantize(value, self.format, keep_master=True)
        elif not torch.equal(ops.master(self.quantized), value):
            self.quantized.copy_(value)
            flush_step([self.quantized])
        return _Show.apply(weight, self.quantized)


def flush_step(weights):
    """What follows an optimizer step on whole quantized weights, on one device."""
    ops._flush_after_step(weights, [0] * len(weights), [False] * len(weights), None)


class LinearOfTwoValues(torch.autograd.Function):
    """linear by one weight, with dgrad by another."""

    @staticmethod
    def forward(ctx, x, weight, dgrad_weight, bias):
        ctx.save_for_backward(x, dgrad_weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, dgrad_weight = ctx.saved_tensors
        needs_x, needs_weight, _, needs_bias = ctx.needs_input_grad
        return (
            grad @ dgrad_weight if needs_x else None,
            grad.t() @ x if needs_weight else None,
            None,
            grad.sum(0) if needs_bias else None,
        )


def plain_linear(format):
    """nn.Linear with a plain weight and the arithmetic of a quantized one on CPU: what stock FSDP2
    does with it is the oracle for what ours must do."""

    class PlainLinear(nn.Linear):
        shadow = None

        def forward(self, x):
            self.shadow = self.shadow or Shadow(format)
            weight = self.shadow(self.weight).to(x.dtype)
            if has_two_images(format):
                dgrad_weight = shown_to_dgrad(self.shadow.quantized).to(x.dtype)
                return LinearOfTwoValues.apply(x, weight, dgrad_weight, self.bias)
            return F.linear(x, weight, self.bias)

    return PlainLinear


def make_plain(model, format):
    """Gives a plain model's linears the arithmetic of quantized ones."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.__class__ = plain_linear(format_of(format, name))
    return model


def build_oracle(format, *, rows=257, recompute=None, prepare=None, **kwargs):
    """As build(), with plain fp32 parameters only."""
    torch.manual_seed(0)
    model = make_plain(Model(rows, recompute=recompute, format=format), format).to(device())
    if prepare:
        prepare(model)
    return shard(model, **kwargs)


def recipe_of(fmt):
    return next(recipe for name, recipe in RECIPES.items() if name.split("[")[0] == fmt)


# ------------------------------------------------------------------------------- training


def batch(step, microbatch=0, rank=None, dtype=torch.float32):
    """This rank's input, the same on any device."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank + 1)
    # Reentrant activation checkpointing trains only what comes after an input with a gradient.
    return torch.randn(16, WIDTH, generator=generator).to(device(), dtype).requires_grad_()


def adamw(model, **kwargs):
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, **kwargs)


def loss_of(model, x):
    return (model(x) - x).float().square().mean()


def train(model, optimizer=None, *, steps=3, first_step=0, microbatches=1, synced=True, resharded=True):
    """This rank's losses. `synced`: reduce every microbatch's gradients; `resharded`: free the
    gathered weights after every microbatch's backward."""
    optimizer = optimizer or adamw(model)
    losses = []
    for step in range(first_step, first_step + steps):
        for microbatch in range(microbatches):
            last = microbatch == microbatches - 1
            if not resharded:
                model.set_reshard_after_backward(last)
            if not synced:
                model.set_requires_gradient_sync(last)
            loss = loss_of(model, batch(step, microbatch)) / microbatches
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_by_sgd(model, steps, features, growth=0):
    """Losses of a model on a batch of its own for each step; inputs grow by `growth` a step."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    dtype = next(model.parameters()).dtype
    for step in steps:
        x = torch.randn(6, features, generator=torch.Generator().manual_seed(step))
        loss = model((x * (1 + growth * step)).to(dtype)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ------------------------------------------------------------------- looking at gradients


# Relative, of a model's gradients that were reduced in few bits.
REDUCTION_ERROR = {"float8": 0.04, "mxfp8": 0.04, "nvfp4": 0.14}


def gradients(model):
    return {name: local(p.grad) * 1 for name, p in model.named_parameters()}


def relative_error(got, want):
    """The relative error of all gradients of a model, over all ranks."""
    sums = torch.zeros(2)
    for name in want:
        sums[0] += (got[name].double() - want[name].double()).square().sum().item()
        sums[1] += want[name].double().square().sum().item()
    dist.all_reduce(sums := sums.to(device()))
    return (sums[0] / sums[1]).sqrt().item()


# --------------------------------------------------------------------- looking at weights


def local(tensor):
    """The local tensor of a DTensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def quantized_parameters(model):
    return {n: p for n, p in model.named_parameters() if qshard.is_quantized(p)}


def is_dirty(param):
    """Whether a write awaits the flush that all ranks take part in."""
    layout = ops._pack(local(param).detach())[2]
    return bool(layout[6])


def full_value(param):
    """The whole value that the shards' masters (or codes, without) stand for. (Adding 0 would lose
    the sign of zeros, which NVFP4 has many of.)"""
    value = param.detach().to(device())
    return (value.full_tensor() if isinstance(value, DTensor) else value) * 1


def full_tensor(part, like):
    """The full tensor of parts that lie as those of `like` do, or a copy where that is plain."""
    if not isinstance(like, DTensor):
        return part.clone()
    facts = dict(run_check=False, shape=like.shape, stride=like.stride())
    return DTensor.from_local(part, like.device_mesh, like.placements, **facts).full_tensor()


def image_bytes(weight):
    """Every byte of the row image behind an unflushed-write-free tensor, padding rows included."""
    codes = ops.codes(weight.detach())
    size = ops._storage_bytes(weight)["image"]
    return torch.empty(0, dtype=torch.uint8, device=codes.device).set_(
        codes.untyped_storage(), 0, (size,), (1,)
    )


def grid(weight):
    """The scales that span rows, which are not in the image."""
    weight = weight.detach()
    info = info_of(ops.format(weight))
    if info.scale.place == "grid":
        return ops.scale_inv(weight)
    return torch.empty(0) if info.outer_scale is None else ops.tensor_scale_inv(weight)


def mismatching_bytes(weight, value, keep_master=True):
    """Bytes of image and grid of a gathered weight that differ from quantizing `value` on one
    device; padding rows must be zero. `value` may be a quantized tensor itself."""
    if not ops.is_quantized(value):
        value = quantized_alike(value, weight, keep_master)
    got, want = image_bytes(weight), image_bytes(value)
    want = F.pad(want, (0, got.numel() - want.numel()))
    grids = [grid(t).view(torch.uint8) for t in (weight, value)]
    assert grids[0].shape == grids[1].shape, (grids[0].shape, grids[1].shape)
    return int((got != want).sum() + (grids[0] != grids[1]).sum())


@contextlib.contextmanager
def unsharded(model):
    """All of a model's weights gathered."""
    modules = [m for m in model.modules() if hasattr(m, "unshard")]
    for module in modules:
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()


def check_gathered(model, values=None):
    """Asserts that every gathered weight is the quantization of the current value, and returns how
    many weights that were. `values`: by name, instead of what the shards hold.

    Bit for bit, unless the value itself is made from the codes: quantizing it again gives the same
    numbers, but other bytes where a block's largest code was rounded up to 224 * 2^k.
    """
    sharded = quantized_parameters(model)
    exact = {n for n, p in sharded.items() if values is not None or ops._keeps_master(local(p))}
    if values is None:
        values = {name: full_value(param) for name, param in sharded.items()}
    with unsharded(model):
        for name, weight in quantized_parameters(model).items():
            assert not isinstance(weight, DTensor), name
            if name in exact:
                keeps_master = ops._keeps_master(local(sharded[name]))
                wrong = mismatching_bytes(weight, values[name], keeps_master)
                assert wrong == 0, f"{name}: {wrong} mismatching bytes"
            shown = ops.dequantize(quantized_alike(values[name], weight))
            assert torch.equal(ops.dequantize(weight, dtype=shown.dtype), shown), name
    return len(values)


def local_values(model):
    """Name to a copy of this rank's rows of the value: the master, if one is kept."""
    return {name: local(param).detach() * 1 for name, param in model.named_parameters()}


def different(tensors, others):
    """Names whose tensors are not bit-identical."""
    assert tensors.keys() == others.keys()
    return [n for n in tensors if not torch.equal(tensors[n], others[n])]


# --------------------------------------------------------------------- counting collectives


@contextlib.contextmanager
def collectives():
    """Yields a list that holds, after the block, (operator, input sizes) of every collective that
    this rank entered, from whatever language it was called."""
    calls = []
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, acc_events=True
    ) as profile:
        yield calls
    for event in profile.events():
        if event.name.startswith("c10d::"):
            calls.append((event.name.removeprefix("c10d::").strip("_"), event.input_shapes))


@contextlib.contextmanager
def noted(names, note):
    """Yields a list of note(input) for every call of these functions of torch.distributed, (output, input, …)."""
    stock, notes = {name: getattr(dist, name) for name in names}, []

    def recorded(name):
        def call(output, input, *args, **kwargs):
            notes.append(note(input))
            return stock[name](output, input, *args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, recorded(name))
    try:
        yield notes
    finally:
        for name in names:
            setattr(dist, name, stock[name])


# How often what a rank puts into a collective leaves it for each other rank, per rank.
_SENT = {"all_gather_into_tensor": None, "all_gather": None, "reduce_scatter_tensor": 1, "all_to_all_single": 1,
         "all_reduce": 2}


@contextlib.contextmanager
def bytes_sent():
    """Yields a list of (collective, bytes that leave this rank) of those that are asked for in Python: all
    that is put into one but the rank's own part, and of an all-reduce, by a ring, twice that."""
    stock, sent = {}, []

    def recorded(name, at, factor):
        def call(*args, **kwargs):
            *_, tensor = (t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor))
            ranks = (kwargs.get("group") or dist.group.WORLD).size()
            agrees = name == "all_reduce" and kwargs.get("op") == dist.ReduceOp.MAX  # on amaxes
            sent.append(("agreement" if agrees else name, tensor.nbytes * (ranks - 1) * (factor or ranks) // ranks))
            return stock[at](*args, **kwargs)

        return call

    for name, factor in _SENT.items():
        for at in {name, single_or(name)}:
            stock[at] = getattr(dist, at)
            setattr(dist, at, recorded(name, at, factor))
    try:
        yield sent
    finally:
        for at, function in stock.items():
            setattr(dist, at, function)


def sent_by(calls, *names):
    return sum(nbytes for name, nbytes in calls if name in names)


def single_or(name):
    """The name by which FSDP calls a collective: torch 2.15 has another one."""
    single = name.replace("_into_tensor", "_single").replace("_tensor", "_single")
    return single if hasattr(dist, single) else name


def gathers(note):
    """Yields a list of note(input) for every all-gather that FSDP2 asks for."""
    return noted([single_or("all_gather_into_tensor")], note)


def count(calls, name):
    return sum(call == name for call, _ in calls)
