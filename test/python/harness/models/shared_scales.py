"""Models whose weights share tensor scales, trained on any mesh."""

import torch
import torch.distributed.checkpoint as dcp
from dist_helpers import device, full_mesh, gather_objects
from models.blocks import FusableBlock
from models.weights import full_tensor, local as local_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import qshard
from qshard._runtime.classes import TensorState
from qshard.formats import info_of

ops = torch.ops.qshard
RECIPES = {
    "nvfp4": qshard.NVFP4BlockScaling(),
    "nvfp4_1x16": qshard.NVFP4BlockScaling(disable_2d_quantization=True),
    "float8_tensorwise": qshard.Float8CurrentScaling(),
}
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def plain(seed=0):
    """The largest of a group is now in this weight, now in that."""
    torch.manual_seed(seed)
    model = nn.Sequential(FusableBlock(), FusableBlock())
    with torch.no_grad():
        for i, block in enumerate(model):
            for j, names in enumerate(GROUPS):
                for k, name in enumerate(names):
                    block.get_submodule(name).weight.mul_(1 + (i + j + 2 * k) % 3)
    return model.to(device())


def build(format, sharded=None, seed=0, share=True, **kwargs):
    """sharded: None, or whether quantize_ comes "before" or "after" fully_shard."""
    model = plain(seed)
    recipe = RECIPES[format]
    if sharded != "after":
        qshard.quantize_(model, recipe, share_tensor_scale=share, **kwargs)
    if sharded:
        for block in model:
            fully_shard(block, mesh=full_mesh())
        fully_shard(model, mesh=full_mesh())
    if sharded == "after":
        qshard.quantize_(model, recipe, share_tensor_scale=share, **kwargs)
    return model


def step(model, optimizer, seed):
    """A step by gradients that do not depend on the mesh."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        grad = torch.randn(parameter.shape, generator=generator).to(device(), parameter.dtype)
        if isinstance(parameter, DTensor):
            grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
        parameter.grad = grad
    optimizer.step()


def looks(model):
    """{name: (value, what its codes stand for, tensor scale)} of the quantized weights, whole."""
    result = {}
    for name, parameter in model.named_parameters():
        if not qshard.is_quantized(parameter):
            continue
        local = local_of(parameter.detach())
        codes = full_tensor(ops.dequantize(local, dtype=torch.float32), parameter)
        value = full_tensor(TensorState(local).export_view().clone(), parameter)
        nvfp4 = info_of(ops.format(local)).outer_scale
        scale = ops.tensor_scale_inv(local) if nvfp4 else ops.scale_inv(local)
        scales = scale.flatten().tolist()  # none of an empty shard
        if isinstance(parameter, DTensor):
            scales = [s for known in gather_objects(scales) for s in known]
        (scale,) = set(scales)
        result[name] = value.cpu(), codes.cpu(), scale
    return result


def train(format, sharded=None, steps=3, foreach=True, **kwargs):
    """What weights look like at first and after each step."""
    model = build(format, sharded, **kwargs)
    return looks_while_training(model, steps, foreach)


def looks_while_training(model, steps, foreach):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=foreach)
    seen = [looks(model)]
    for i in range(steps):
        step(model, optimizer, i)
        seen.append(looks(model))
    return seen


def forward_and_reshard(model, x):
    model(x).sum()
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def save(format, folder, **kwargs):
    """Saves a trained model, on all ranks."""
    model = build(format, "before", **kwargs)
    step(model, torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True), 0)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    return looks(model)


def load(format, folder, **kwargs):
    """Into another model; what it looks like once its groups have met, and after a first forward."""
    model = build(format, "after", seed=1, **kwargs)
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    forward_and_reshard(model, torch.randn(2, 48, device=device()))
    first = looks(model)
    qshard.flush(model)
    return first, looks(model)


def apart(sharded=None):
    """q has an optimizer of its own: (after its step, after a flush of the model)."""
    model = build("nvfp4", sharded)
    q = model[0].q_proj.weight
    optimizer = torch.optim.SGD([q], lr=10.0)
    step(model, optimizer, 0)
    alone = looks(model)
    forward_and_reshard(model, torch.ones(2, 48, device=device()))
    qshard.flush(model)
    return alone, looks(model)


def train_tensor_parallel(format, steps=2):
    """As `train`, with q, k, gate and up cut by rows, v whole on every rank."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model, mesh = plain(), full_mesh()
    columnwise = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "gate_proj", "up_proj")}
    for block in model:
        parallelize_module(block, mesh, {**columnwise, "down_proj": RowwiseParallel()})
    qshard.quantize_(model, RECIPES[format], share_tensor_scale=True, tp_mesh=mesh)
    return looks_while_training(model, steps, foreach=False)
