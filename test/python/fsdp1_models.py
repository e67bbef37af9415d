"""Models under FSDP1 whose weights are quantized at each use, for the tests of it."""

import contextlib

import torch
import torch.distributed as dist
from dist_helpers import device, full_mesh
from dist_models import (
    Block,
    Model,
    RECIPES,
    adamw,
    batch,
    format_of,
    shard,
    quantize_model,
)
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import qshard

BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16_POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def make_dynamic(model, format, **kwargs):
    return quantize_model(model, format, weights="dynamic", **kwargs)


def wrap(model, strategy="FULL_SHARD", use_orig_params=True, mixed_precision=None, **kwargs):
    if strategy.startswith("HYBRID"):
        world = dist.get_world_size()
        shape = (2, world // 2) if world > 1 else (1, 1)
        kwargs["device_mesh"] = full_mesh(*shape, names=("replicate", "shard"))
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        mixed_precision=mixed_precision,
        sharding_strategy=ShardingStrategy[strategy],
        device_id=device(),
        **kwargs,
    )


def build_fsdp1(format, *, rows=257, gather="quantized", prepare=None, recompute=None, **kwargs):
    torch.manual_seed(0)
    model = make_dynamic(Model(rows, format=format, recompute=recompute).to(device()), format)
    if prepare:
        prepare(model)
    return qshard.prepare_for_fsdp1(wrap(model, **kwargs), gather=gather)


def build_fsdp2(format, *, rows=257, prepare=None, recompute=None, mesh=None, **kwargs):
    """The same with quantized parameters under FSDP2."""
    torch.manual_seed(0)
    model = quantize_model(Model(rows, format=format, recompute=recompute).to(device()), format)
    if prepare:
        prepare(model)
    return shard(model, mesh=mesh, **kwargs)


def full_values(model):
    """Name to whole value, under FSDP1 and FSDP2."""
    if isinstance(model, FSDP):
        with FSDP.summon_full_params(model):
            return {
                name.replace("_fsdp_wrapped_module.", ""): p.detach().clone()
                for name, p in model.named_parameters()
            }
    return {name: p.detach().full_tensor() * 1 for name, p in model.named_parameters()}


def different_values(model, other):
    values, others = full_values(model), full_values(other)
    assert values.keys() == others.keys()
    return [name for name in values if not torch.equal(values[name], others[name])]


@contextlib.contextmanager
def gathered_bytes():
    """Yields a list of the bytes that this rank sends in each all-gather of FSDP1, and of ours."""
    stock, sent = {}, []
    names = ("all_gather", "all_gather_into_tensor")

    def recorded(name):
        def gather(output, input, *args, **kwargs):
            sent.append(input.nbytes)
            return stock[name](output, input, *args, **kwargs)

        return gather

    for name in names:
        stock[name] = getattr(dist, name)
        setattr(dist, name, recorded(name))
    try:
        yield sent
    finally:
        for name in names:
            setattr(dist, name, stock[name])
