"""Models under FSDP1 whose weights are quantized at each use."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from collective_calls import noted
from dist_helpers import device, full_mesh
from models.blocks import Block, Model
from models.formats import DELAYED, quantize_model
from models.fsdp2 import shard
from models.training import adamw, batch, loss_of, train_within
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import distribute_tensor

import qshard
from qshard import module_state

SENT_AS_CODES = ("float8_tensorwise", "float8_rowwise", "float8_blockwise", DELAYED)
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16_POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def make_dynamic(model, format, **kwargs):
    return quantize_model(model, format, weights="dynamic", **kwargs)


def wrap(model, strategy="FULL_SHARD", use_orig_params=True, mixed_precision=None, **kwargs):
    if "HYBRID" in strategy:
        kwargs["device_mesh"] = full_mesh(2, 2, names=("replicate", "shard"))
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        mixed_precision=mixed_precision,
        sharding_strategy=ShardingStrategy[strategy],
        device_id=device(),
        **kwargs,
    )


def build_fsdp1(
    format, *, rows=257, gather="quantized", prepare=None, recompute=None, seed=0, **kwargs
):
    torch.manual_seed(seed)
    model = make_dynamic(Model(rows, format=format, recompute=recompute).to(device()), format)
    if prepare:
        prepare(model)
    return qshard.prepare_for_fsdp1(wrap(model, **kwargs), gather=gather)


def build_fsdp2(format, *, rows=257, prepare=None, recompute=None, mesh=None, strategy="", **kwargs):
    """The same with quantized parameters under FSDP2."""
    if "HYBRID" in strategy:
        mesh = full_mesh(2, 2, names=("replicate", "shard"))
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
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # A root stays gathered after a forward without a backward.
    return {name: p.detach().full_tensor() * 1 for name, p in model.named_parameters()}


def different_values(model, other):
    values, others = full_values(model), full_values(other)
    assert values.keys() == others.keys()
    return [name for name in values if not torch.equal(values[name], others[name])]


def sums_alike(strategy=""):
    """Whether FSDP1 sums the gradients of ranks as FSDP2 does: two at a time. With more ranks the order
    is that of their places, which differ."""
    return dist.get_world_size() <= 2 or "HYBRID" in strategy


def check_as(seen, others, model, twin, exact=True):
    """Asserts that what training has seen, losses first, and weights are those of another run; if not bit
    for bit, what came before the first step, and the rest as far as sums in another order take them."""
    if exact:
        assert seen == others
        assert not different_values(model, twin)
        return
    assert seen[0] == others[0] and seen == pytest.approx(others, rel=1e-2)
    values, wanted = full_values(model), full_values(twin)
    for name, want in wanted.items():
        assert (values[name] - want).norm() <= 1e-2 * want.norm(), name


def train_fsdp1(model, *, optimizer=None, steps=3, microbatches=1, synced=True):
    """This rank's losses."""

    def synced_or_last(last):
        return contextlib.nullcontext() if synced or last else model.no_sync()

    return train_within(synced_or_last, model, optimizer, range(steps), microbatches)


def load_then_step(model, format):
    """Steps, and a load between backward and a step."""
    optimizer, losses = adamw(model), []
    torch.manual_seed(7)
    other = Model(format=format).to(device())
    values = {name: p.detach() * 2 for name, p in other.named_parameters()}
    for step in range(4):
        loss = loss_of(model, batch(step))
        loss.backward()
        losses.append(loss.item())
        if step == 1:
            load(model, values)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def load(model, values):
    if not isinstance(model, FSDP):
        params = dict(model.named_parameters())
        values = {
            name: distribute_tensor(value, params[name].device_mesh, params[name].placements)
            for name, value in values.items()
        }
        model.load_state_dict(values, strict=False)
        return
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(values, strict=False)


def gathered_bytes():
    """Yields a list of the bytes that this rank sends in each all-gather of FSDP1, and of ours."""
    return noted(("all_gather", "all_gather_into_tensor"), lambda sent: sent.nbytes)


def check_gathers(model):
    """Asserts that each unit's gather of codes gives what quantizing its whole weights gives, and the
    others in full; returns how many weights that were."""
    values = {}
    with FSDP.summon_full_params(model):
        for unit in module_state.of(model).fsdp1.units:
            for weight in unit.weights:
                info = unit.flat._param_infos[weight.place.index]
                value = getattr(info.module, info.param_name).detach().clone()
                values[id(weight)] = value
    checked = 0
    for unit in module_state.of(model).fsdp1.units:
        if not unit.gathers_codes:
            continue
        numel = unit.shard_numel * unit.handle.world_size
        dtype = unit.handle._fwd_bwd_param_dtype
        stock = torch.zeros(numel, device=device(), dtype=unit.local_shard().dtype)
        out = torch.zeros(numel, device=device(), dtype=dtype)
        unit.all_gather(unit.handle, out)
        dist.all_gather_into_tensor(stock, unit.local_shard().detach().to(device()), group=unit.group)
        expected = stock.to(dtype)
        for weight in unit.weights:
            if weight.sends_codes:
                shown = shown_values(values[id(weight)], weight.dynamic, dtype)
                expected[weight.place.start : weight.place.end] = shown.flatten()
                checked += 1
        assert torch.equal(out, expected), "gathered values"
    return checked


def shown_values(value, dynamic, dtype=torch.bfloat16):
    """What a whole weight's codes stand for, with the scales in use."""
    if value.dtype == torch.float64:
        value = value.float()
    whole = torch.ops.qshard._quantize_for_uses(value, dynamic.format, dynamic.state)
    return torch.ops.qshard.dequantize(whole, dtype=dtype)


def train_step(model, optimizer, number):
    loss = loss_of(model, batch(number))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def freeze_some(model):
    for weight in (model.blocks[0].up.weight, model.blocks[1].down.weight, model.head.weight):
        weight.requires_grad_(False)
