"""Tensor-parallel models, and what their weights must be."""

import torch
from dist_helpers import device
from helpers import fit, has_two_images, row_bytes
from models.blocks import MLP
from models.formats import RECIPES
from models.plain_twins import flush_step
from models.weights import full_tensor, grid, image_bytes, unsharded
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import qshard
from qshard._runtime.classes import TensorState
from qshard.formats import info_of

ops = torch.ops.qshard


def replicated():
    return {"up": ColwiseParallel(), "down": RowwiseParallel()}


def sequence_parallel():
    return {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }


def prepared_input():
    """As sequence_parallel, the block's input gathered before its norm."""
    return {
        "": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1)),
        **sequence_parallel(),
    }


def fitted(format, shape, tp):
    """Parts of tensor parallelism are in whole blocks where the format asks for that."""
    if not has_two_images(format):
        return shape
    return tuple(fit(format, -(-size // tp)) * tp for size in shape)


def prepared_output():
    """As sequence_parallel, the block's output gathered after it."""
    whole = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    return {"": whole, **sequence_parallel()}


def varied(rows, cols, seed):
    """Magnitudes differ by row, by column and by half, so that another rank's scale shows."""
    generator = torch.Generator().manual_seed(seed)
    by_row = 2.0 ** torch.randint(-4, 5, (rows, 1), generator=generator)
    by_col = 2.0 ** torch.randint(-2, 3, (1, cols), generator=generator)
    value = torch.randn(rows, cols, generator=generator) * by_row * by_col * 2.0**-6
    value[: rows // 2] *= 2.0**-5
    value[:, : cols // 2] *= 2.0**-3
    return value


def mlp(dim, hidden, device_type=None):
    torch.manual_seed(0)
    with torch.device(device_type or device()):
        return MLP(dim, hidden)


@torch.no_grad()
def initialise(model):
    """The same full values, however the parameters lie."""
    for seed, linear in enumerate((model.up, model.down)):
        weight = linear.weight
        value = varied(*weight.shape, seed).to(device())
        write(weight, value)
    write(model.norm.weight, torch.ones(model.norm.weight.shape, device=device()))
    for bias in (model.norm.bias, model.down.bias):
        write(bias, torch.linspace(-1, 1, bias.numel(), device=device()))
    return model


def write(param, value):
    if isinstance(param, DTensor):
        value = local_part(value, param)
        param = param._local_tensor
    param.copy_(value)


def local_part(value, param):
    """What a DTensor's rank holds of a full value: tensor parallelism cuts before FSDP does."""
    mesh, placements = param.device_mesh, param.placements
    strided = [type(p).__name__ == "_StridedShard" for p in placements]
    for dims in ((False,), (True,)):
        for i, placement in enumerate(placements):
            if strided[i] not in dims or placement.is_replicate():
                continue
            ranks, rank = mesh.size(i), mesh.get_local_rank(i)
            length = -(-value.shape[placement.dim] // ranks)
            size = value.shape[placement.dim]
            first = min(length * rank, size)
            value = value.narrow(placement.dim, first, min(length, size - first))
    return value


def give_gradient(param, full):
    if not isinstance(param, DTensor):
        param.grad = full
        return
    param.grad = DTensor.from_local(
        local_part(full, param).contiguous(),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def build(format, mesh, dim, hidden, *, order="pqf", plan=replicated, fsdp=True, **options):
    """An MLP on a mesh whose last dimension is "tp"; the others are FSDP's or HSDP's. options: of
    quantize_."""
    is_meta = order.startswith("meta")
    model = mlp(dim, hidden, "meta" if is_meta else None)
    if not is_meta:
        initialise(model)
    tp_mesh = mesh["tp"]
    dp_mesh = mesh[tuple(name for name in mesh.mesh_dim_names if name != "tp")]
    for step in order.removeprefix("meta-"):
        if step == "p":
            parallelize_module(model, tp_mesh, plan())
        elif step == "q":
            qshard.quantize_(model, RECIPES[format], tp_mesh=tp_mesh, **options)
        elif fsdp:
            fully_shard(model, mesh=dp_mesh)
    if is_meta:
        model.to_empty(device=device())
        initialise(model)
    return model


def full_value(param):
    """The full tensor that a quantized DTensor, or a tensor, is a part of: of masters, if there are."""
    value = local(param)
    master = ops.master(value)
    return full_tensor(ops.dequantize(value) if master is None else master, param)


class Definition:
    """What the weights' images and grids have to be: of the part that tensor parallelism gives this
    rank, in blocks of its own, by the full tensor's scale, or those of its rows, with the full tensor's
    history."""

    def __init__(self, model, format, tp_mesh):
        self.weights = [model.up.weight, model.down.weight]
        self.tp_mesh = tp_mesh
        self.has_tensor_scale = info_of(format).has_tensor_scale
        self.scales_rows = info_of(format).gemm.folds_row_scales
        values = [self.values(dim, weight) for dim, weight in enumerate(self.weights)]
        self.quantized = [ops.quantize(value, format, keep_master=True) for value in values]
        self.rows = [self.part(dim, weight).shape[0] for dim, weight in enumerate(self.weights)]

    def part(self, dim, weight):
        full = full_value(weight)
        parts = full.chunk(self.tp_mesh.size(), dim)
        return parts[self.tp_mesh.get_local_rank()].contiguous()

    def values(self, dim, weight):
        """The part, and below it in blocks of its own a row with the largest value of the tensor."""
        if self.is_cut_within_scales(dim):
            return full_value(weight)
        part = self.part(dim, weight)
        if not self.has_tensor_scale:
            return part
        below = torch.zeros(16 + -part.shape[0] % 16, part.shape[1], device=part.device)
        below[-1, 0] = full_value(weight).abs().max()
        return torch.cat([part, below])

    def is_cut_within_scales(self, dim):
        """Whether this rank has columns of rows that have one scale: those of the full tensor's codes."""
        return self.scales_rows and dim == 1

    def step(self, model):
        """After an optimizer step of the model."""
        self.weights = [model.up.weight, model.down.weight]
        for dim, (weight, quantized) in enumerate(zip(self.weights, self.quantized)):
            quantized.copy_(self.values(dim, weight))
        flush_step(self.quantized)

    def mismatches(self, model):
        """Bytes of gathered images and grids that differ."""
        wrong = 0
        with unsharded(model):
            for dim, (linear, want, rows) in enumerate(zip((model.up, model.down), self.quantized, self.rows)):
                got = local(linear.weight)
                image, wanted = (image_bytes(t).view(t.shape[0], -1) for t in (padded(got), want))
                if self.is_cut_within_scales(dim):
                    columns = wanted[:, : want.shape[1]].chunk(self.tp_mesh.size(), 1)
                    wanted = columns[self.tp_mesh.get_local_rank()]
                    image = image[:, : got.shape[1]]
                wrong += int((image[:rows] != wanted[:rows]).sum())
                scales = [grid(t).contiguous().view(torch.uint8) for t in (got, want)]
                assert scales[0].shape == scales[1].shape
                wrong += int((scales[0] != scales[1]).sum())
        return wrong


def padded(weight):
    """All rows of a gathered tensor's buffer, FSDP2's padding included."""
    rows = TensorState(weight).storage_bytes()["image"] // row_bytes_of(weight)
    return weight.detach().as_strided((rows, weight.shape[1]), (weight.shape[1], 1))


def row_bytes_of(weight):
    return row_bytes(ops.format(weight), weight.shape[1])


def local(param):
    param = param.detach()
    return param._local_tensor if isinstance(param, DTensor) else param
