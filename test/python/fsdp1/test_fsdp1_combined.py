"""FSDP1 with weights quantized at each use: mixed precision of every format and strategy, and modes that
meet: frozen and tied weights, unsynchronized microbatches, loads before a step, gradient scalers."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from dist_helpers import device, on_ranks, on_worlds
from models.blocks import Model
from models.fsdp1 import (
    BF16,
    BF16_POLICY,
    SENT_AS_CODES,
    build_fsdp1,
    build_fsdp2,
    check_as,
    check_gathers,
    different_values,
    freeze_some,
    load_then_step,
    make_dynamic,
    shown_values,
    sums_alike,
    train_fsdp1,
    wrap,
)
from models.fsdp2 import shard
from models.plain_twins import make_plain
from models.training import adamw, batch, loss_of, train
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from qshard import module_state

ORIG_OR_FLAT = pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])


def freeze_block(model):
    """A whole unit, as use_orig_params=False has it."""
    model.blocks[0].requires_grad_(False)


# ------------------------------------------------------------- mixed precision, gathered in full


def run_bf16(format, **kwargs):
    torch.manual_seed(0)
    if device().type == "cpu":
        oracle = make_plain(Model(format=format), format)
        oracle, train_oracle = wrap(oracle, mixed_precision=BF16, **kwargs), train_fsdp1
    else:  # GEMMs multiply codes, of which FSDP2 knows nothing
        oracle = make_dynamic(Model(format=format).to(device()), format)
        oracle, train_oracle = shard(oracle, mp_policy=BF16_POLICY), train
    model = build_fsdp1(format, mixed_precision=BF16, gather="param_dtype", **kwargs)
    exact = device().type == "cpu" or sums_alike()
    check_as(train_fsdp1(model), train_oracle(oracle), model, oracle, exact)


@pytest.mark.pairwise
@ORIG_OR_FLAT
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("format", ["float8_tensorwise", "float8_blockwise", "mxfp8", "nvfp4"])
@on_ranks(1, 2, 3)
def test_weights_gathered_in_bf16(format, strategy, use_orig_params):
    """Quantized from what is gathered, as a plain model with the same arithmetic."""
    run_bf16(format, strategy=strategy, use_orig_params=use_orig_params)


# ------------------------------------------------------------------ codes, in modes that meet


def gather_in_full(model):
    """Makes the units gather fp32, quantize whole weights, and show their values: the oracle."""
    for unit in module_state.of(model).fsdp1.units:
        if unit.gathers_codes:
            unit.handle._all_gather_flat_param = lambda out, unit=unit: _gather_in_full(unit, out)
    return model


def _gather_in_full(unit, out):
    if unit.handle._force_full_precision:
        return type(unit.handle)._all_gather_flat_param(unit.handle, out)
    values = torch.empty(out.numel(), device=out.device)
    dist.all_gather_into_tensor(values, unit.local_shard().detach(), group=unit.group)
    out.copy_(values)
    for weight in unit.weights:
        if weight.sends_codes:
            place = slice(weight.place.start, weight.place.end)
            whole = values[place].view(weight.place.shape)
            out[place] = shown_values(whole, weight.dynamic).flatten()
    return out


def train_scaled(model, microbatches=2, synced=False):
    """With a gradient scaler, that skips a step."""
    optimizer, losses = adamw(model, fused=True), []
    scaler = ShardedGradScaler(device().type, init_scale=8.0)
    for step in range(4):
        for microbatch in range(microbatches):
            last = microbatch == microbatches - 1
            with contextlib.nullcontext() if synced or last else model.no_sync():
                loss = loss_of(model, batch(step, microbatch)) / microbatches
                (scaler.scale(loss) * (float("inf") if step == 1 else 1)).backward()
            losses.append(loss.item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert losses[2:4] != losses[0:2] and scaler.get_scale() == 4.0
    return losses


def run_combined(format, rows, frozen, **kwargs):
    prepare = freeze_some if kwargs["use_orig_params"] else freeze_block
    kwargs |= dict(mixed_precision=BF16, rows=rows, prepare=prepare if frozen else None)
    model, oracle = build_fsdp1(format, **kwargs), gather_in_full(build_fsdp1(format, **kwargs))
    assert train_scaled(model) == train_scaled(oracle)
    assert not different_values(model, oracle)
    assert check_gathers(model) == (2 if format == "mix-1" else 5)


@pytest.mark.pairwise
@ORIG_OR_FLAT
@pytest.mark.parametrize("recompute", [None, False, True])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"])
@pytest.mark.parametrize("rows", [3, 257])
@pytest.mark.parametrize("format", [*SENT_AS_CODES, "mix-1"])
@on_worlds(4)
def test_no_sync_with_a_scaler(world, format, rows, strategy, frozen, recompute, use_orig_params):
    kwargs = dict(strategy=strategy, recompute=recompute, use_orig_params=use_orig_params)
    world.run(run_combined, format, rows, frozen, **kwargs)


@pytest.mark.pairwise
@ORIG_OR_FLAT
@pytest.mark.parametrize("format", SENT_AS_CODES)
@on_ranks(2)
def test_frozen_weights_and_a_load_before_a_step_as_fsdp2(format, use_orig_params):
    prepare = freeze_some if use_orig_params else freeze_block
    kwargs = dict(mixed_precision=BF16, use_orig_params=use_orig_params)
    model = build_fsdp1(format, prepare=prepare, **kwargs)
    twin = build_fsdp2(format, prepare=prepare, mp_policy=BF16_POLICY)
    assert load_then_step(model, format) == load_then_step(twin, format)
    assert not different_values(model, twin)
