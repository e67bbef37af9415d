"""FSDP1 with weights quantized at each use trains as FSDP1 trains plain fp32 parameters with the same
arithmetic, bit for bit. On GPUs, where GEMMs multiply codes, as FSDP2 trains quantized parameters."""

import pytest
import torch
from dist_helpers import device, on_ranks, on_worlds
from models.blocks import Model
from models.formats import MIXES
from models.fsdp1 import (
    BF16,
    BF16_POLICY,
    SENT_AS_CODES,
    build_fsdp1,
    build_fsdp2,
    check_as,
    freeze_some,
    full_values,
    sums_alike,
    train_fsdp1,
    wrap,
)
from models.plain_twins import make_plain
from models.training import train

BUDGET_S = 60
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def build_plain(format, *, rows=257, recompute=None, prepare=None, **kwargs):
    """FSDP1 of plain fp32 parameters with the arithmetic of quantized ones: the oracle."""
    torch.manual_seed(0)
    model = make_plain(Model(rows, format=format, recompute=recompute), format).to(device())
    if prepare:
        prepare(model)
    return wrap(model, **kwargs)


def run_fp32(format, rows=257, train_as=None, **kwargs):
    train_as = train_as or {}
    model = build_fsdp1(format, rows=rows, **kwargs)
    losses, exact = train_fsdp1(model, **train_as), True
    if device().type == "cpu":
        other = build_plain(format, rows=rows, **kwargs)
        others = train_fsdp1(other, **train_as)
    else:
        kwargs.pop("use_orig_params", None)
        other = build_fsdp2(format, rows=rows, **kwargs)
        others = train(other, **train_as)
        # In microbatches that are not reduced, GEMMs add to the gradients of quantized parameters.
        exact = sums_alike(kwargs.get("strategy", "")) and train_as.get("synced", True)
    check_as(losses, others, model, other, exact)
    return losses


# ------------------------------------------------------------------------------- modes, fp32


@pytest.mark.pairwise
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("format", MIXES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_worlds(1, 2, 4)
def test_a_strategy_trains_as_fsdp2(world, strategy, format, use_orig_params):
    losses = world.run(run_fp32, format, strategy=strategy, use_orig_params=use_orig_params)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.pairwise
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("format", MIXES)
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@on_ranks(4)
def test_a_hybrid_strategy_trains_as_hsdp(strategy, format, use_orig_params):
    run_fp32(format, strategy=strategy, use_orig_params=use_orig_params)


MODES = {
    "accumulate": dict(train_as=dict(microbatches=2)),
    "no-sync": dict(train_as=dict(microbatches=2, synced=False)),
    "recompute": dict(recompute=False),
    "recompute-reentrant": dict(recompute=True),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("format", MIXES)
@pytest.mark.parametrize("mode", MODES)
@on_worlds(2, 3)
def test_a_mode_trains_as_fsdp2(world, mode, format, strategy, use_orig_params):
    kwargs = dict(strategy=strategy, use_orig_params=use_orig_params)
    world.run(run_fp32, format, rows=33, **kwargs, **MODES[mode])


# ------------------------------------------------------------------- which weights there are


@pytest.mark.parametrize("format", [*MIXES, "float8_blockwise"])
@on_ranks(2)
def test_frozen_weights_train_as_in_fsdp2(format):
    run_fp32(format, prepare=freeze_some)


# ----------------------------------------------------------------------- three and four ranks


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def run_more_ranks(format, use_orig_params, in_bf16):
    model = build_fsdp1(
        format, use_orig_params=use_orig_params, mixed_precision=BF16 if in_bf16 else None
    )
    twin = build_fsdp2(format, **(dict(mp_policy=BF16_POLICY) if in_bf16 else {}))
    optimizers = sgd(model), sgd(twin)
    losses = train_fsdp1(model, optimizer=optimizers[0], steps=1)
    others = train(twin, optimizers[1], steps=1)
    assert losses == others
    values, wanted = full_values(model), full_values(twin)
    ulps = {
        name: (values[name] - want).abs().max().item() / (2**-23 * want.abs().max().item())
        for name, want in wanted.items()
    }
    losses += train_fsdp1(model, optimizer=optimizers[0])
    others += train(twin, optimizers[1])
    check_as(losses, others, model, twin, exact=in_bf16 and device().type == "cpu")
    return max(ulps.values())


@pytest.mark.pairwise
@pytest.mark.parametrize("in_bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("format", SENT_AS_CODES)
@on_worlds(3, 4)
def test_more_ranks_train_as_fsdp2(world, format, use_orig_params, in_bf16):
    """Their sums have another order: of a step that shows in the last bits of each weight's largest."""
    assert max(world.run(run_more_ranks, format, use_orig_params, in_bf16)) <= 4
