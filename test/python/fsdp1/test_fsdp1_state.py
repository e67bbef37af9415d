"""FSDP1 with weights quantized at each use: writes, checkpoints, gradient scalers, refusals."""

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from collective_calls import collectives, count
from dist_helpers import device, error_of, on_ranks, shared_folder
from models.blocks import Model
from models.formats import DELAYED, RECIPES
from models.fsdp1 import (
    BF16,
    SENT_AS_CODES,
    build_fsdp1,
    check_gathers,
    different_values,
    full_values,
    make_dynamic,
    train_fsdp1,
    train_step,
    wrap,
)
from models.training import adamw, batch, loss_of
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import qshard
from qshard import module_state

BUDGET_S = 45
ORIG_OR_FLAT = pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])


# ----------------------------------------------------------------------------------- writes


def write_summoned(model):
    with torch.no_grad(), FSDP.summon_full_params(model, writeback=True):
        for param in model.parameters():
            param.mul_(3)


def write_by_hand(model):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3)


def load_full(model):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        values = {name: v * 3 if v.is_floating_point() else v for name, v in model.state_dict().items()}
        model.load_state_dict(values)


def load_sharded(model):
    other = build_fsdp1("float8_blockwise", mixed_precision=BF16, seed=1)
    for m in (model, other):
        FSDP.set_state_dict_type(m, StateDictType.SHARDED_STATE_DICT)
    values = {n: v for n, v in other.state_dict().items()}
    model.load_state_dict(values, strict=False)


WRITES = (write_summoned, write_by_hand, load_full, load_sharded)


@pytest.mark.pairwise
@ORIG_OR_FLAT
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("format", SENT_AS_CODES)
@on_ranks(2, 3)
def test_writes_are_noticed(format, write, use_orig_params):
    model = build_fsdp1(format, mixed_precision=BF16, use_orig_params=use_orig_params)
    train_fsdp1(model, steps=1)
    before = full_values(model)
    loss_of(model, batch(5)).backward()
    write(model)
    with collectives() as calls:
        loss_of(model, batch(6))
    assert count(calls, "allreduce") == 1  # over all units, at the root's forward
    after = full_values(model)
    assert not torch.equal(before["head.weight"], after["head.weight"])
    assert check_gathers(model) == 5
    with collectives() as calls:
        loss_of(model, batch(7))
    assert count(calls, "allreduce") == 1  # whether another rank has written, none knows


@ORIG_OR_FLAT
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_full_parameters_and_state_dicts_have_full_precision(strategy, use_orig_params):
    """Full precision, after a forward without a backward too, which leaves gathered codes' values."""
    model = build_fsdp1(
        "float8_blockwise", mixed_precision=BF16, strategy=strategy, use_orig_params=use_orig_params
    )
    plain = Model(257).to(device())
    torch.manual_seed(0)
    plain = Model(257).to(device())
    with torch.no_grad():
        model(batch(0))
    values = full_values(model)
    for name, param in plain.named_parameters():
        assert torch.equal(values[name], param), name
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain.get_parameter(name)), name


# ------------------------------------------------------------------------------ checkpoints


KINDS = {
    "full": (
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=False),
        FullOptimStateDictConfig(rank0_only=False),
    ),
    "sharded": (
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(),
        ShardedOptimStateDictConfig(),
    ),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("mixed_precision", [None, BF16], ids=["fp32", "bf16"])
@ORIG_OR_FLAT
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", ["float8_blockwise", DELAYED, "mix-1"])
@on_ranks(1, 2, 3, 4)
def test_resumed_training_goes_on_bit_for_bit(format, kind, use_orig_params, mixed_precision):
    kwargs = dict(use_orig_params=use_orig_params, mixed_precision=mixed_precision)
    model = build_fsdp1(format, **kwargs)
    optimizer = adamw(model)
    for number in range(2):
        train_step(model, optimizer, number)
    other = build_fsdp1(format, seed=1, **kwargs)
    other_optimizer = adamw(other)
    for m in (model, other):
        FSDP.set_state_dict_type(m, *KINDS[kind])
    state = model.state_dict()
    # On CPU FSDP1 gathers several full states into one buffer (torch 2.11), for plain models, too.
    is_gathered = not (kind == "full" and use_orig_params and device().type == "cpu")
    optimizer_state = (
        FSDP.optim_state_dict(model, optimizer) if is_gathered else optimizer.state_dict()
    )
    for value in state.values():
        assert not qshard.is_quantized(value) if isinstance(value, torch.Tensor) else True
    if kind == "full":  # else tensors are shared
        state = copy.deepcopy(state)
    other.load_state_dict(state)
    if is_gathered:
        optimizer_state = FSDP.optim_state_dict_to_load(other, other_optimizer, optimizer_state)
    # torch keeps tensors of the right dtype and device, which on one rank are those of `optimizer`.
    other_optimizer.load_state_dict(copy.deepcopy(optimizer_state))
    for number in range(2, 5):
        losses = train_step(model, optimizer, number), train_step(other, other_optimizer, number)
        assert losses[0] == losses[1], (number, losses)
    assert not different_values(model, other)


@pytest.mark.parametrize("use_orig_params", [True], ids=["orig"])
@pytest.mark.parametrize("format", ["float8_blockwise", DELAYED])
@on_ranks(2)
def test_dcp_resumes_bit_for_bit(format, use_orig_params):
    """DCP makes up an optimizer step, to have states to load into: no history rolls."""
    kwargs = dict(use_orig_params=use_orig_params, mixed_precision=BF16)
    model, other = build_fsdp1(format, **kwargs), build_fsdp1(format, seed=1, **kwargs)
    optimizer, other_optimizer = adamw(model), adamw(other)
    for number in range(2):
        train_step(model, optimizer, number)
    with shared_folder() as folder:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        model_state, optimizer_state = get_state_dict(other, other_optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    for number in range(2, 5):
        losses = train_step(model, optimizer, number), train_step(other, other_optimizer, number)
        assert losses[0] == losses[1], (number, losses)
    assert not different_values(model, other)


# --------------------------------------------------------------------------- gradient scalers


def dynamics(model):
    return [dynamic for _, dynamic in module_state.dynamics_of(model)]


@ORIG_OR_FLAT
@pytest.mark.parametrize("format", [DELAYED, "float8_blockwise"])
@on_ranks(2)
def test_skipped_steps_roll_no_history(format, use_orig_params):
    model = build_fsdp1(format, mixed_precision=BF16, use_orig_params=use_orig_params)
    optimizer, scaler = adamw(model, fused=True), ShardedGradScaler(device().type, init_scale=8.0)
    states = []
    for factor in (1.0, float("inf"), 1.0):
        loss = loss_of(model, batch(len(states)))
        (scaler.scale(loss) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert check_gathers(model) == 5
        states.append([d.state[0][0].clone() for d in dynamics(model) if d.state])
    rolled = [[not torch.equal(a, b) for a, b in zip(x, y)] for x, y in zip(states, states[1:])]
    rolled = [any(r) for r in rolled]
    # The skipped step leaves what the step before did.
    assert rolled == ([False, True] if format == DELAYED else [False, False])


# ------------------------------------------------------------------------------------ refused


@ORIG_OR_FLAT
@on_ranks(2)
def test_wrapping_quantized_parameters_is_refused(use_orig_params):
    model = qshard.quantize_(Model().to(device()), RECIPES["float8_blockwise"])
    before = {name: id(p) for name, p in model.named_parameters()}
    error = error_of(wrap, model, use_orig_params=use_orig_params)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    ignored = [p for p in model.parameters() if qshard.is_quantized(p)]
    assert "no error" == error_of(FSDP, model, ignored_states=iter(ignored), device_id=device())
    assert error.startswith("TypeError: qshard: blocks.0.up.weight is a quantized parameter, and")
    assert 'weights="dynamic"' in error and "qshard.prepare_for_fsdp1(model)" in error


@ORIG_OR_FLAT
@on_ranks(2)
def test_quantizing_after_wrapping_is_refused(use_orig_params):
    model = wrap(Model().to(device()), use_orig_params=use_orig_params)
    error = error_of(qshard.quantize_, model, RECIPES["float8_blockwise"])
    loss_of(model, batch(0)).backward()
    assert error.startswith("RuntimeError: qshard.quantize_: FullyShardedDataParallel has flattened")
    assert 'weights="dynamic"' in error and "qshard.prepare_for_fsdp1(model)" in error


@on_ranks(2)
def test_local_state_dicts_are_refused():
    model = build_fsdp1("float8_blockwise", use_orig_params=False)
    loss_of(model, batch(0)).backward()
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        refused = error_of(model.state_dict)
    plain = wrap(Model().to(device()), use_orig_params=False)
    loss_of(plain, batch(0)).backward()
    for m in (plain, model):
        FSDP.set_state_dict_type(m, StateDictType.LOCAL_STATE_DICT)
    errors = refused, error_of(model.load_state_dict, plain.state_dict())
    for error in errors:
        assert error.startswith("NotImplementedError: qshard: LOCAL state dicts")
        assert "StateDictType.SHARDED_STATE_DICT" in error


@on_ranks(2)
def test_wrong_calls_are_refused_by_name():
    torch.manual_seed(0)
    model = wrap(make_dynamic(Model().to(device()), DELAYED))
    unprepared = error_of(loss_of, model, batch(0))
    twice = error_of(qshard.quantize_, Model(), RECIPES[DELAYED], weights="neither")
    plain = wrap(Model().to(device()))
    errors = [
        error_of(qshard.prepare_for_fsdp1, plain),
        error_of(qshard.prepare_for_fsdp1, make_dynamic(Model(), DELAYED)),
        error_of(qshard.prepare_for_fsdp1, model, gather="fp8"),
    ]
    unprepared, weights, plain, unwrapped, gather = [unprepared, twice, *errors]
    assert "RuntimeError: qshard: float8_delayed[history=3] weights that FSDP shards" in unprepared
    assert "qshard.prepare_for_fsdp1(model)" in unprepared
    assert weights == (
        'ValueError: qshard.quantize_: weights is "quantized" or "dynamic", got \'neither\''
    )
    assert "ValueError" in plain and 'quantize_(model, recipe, weights="dynamic")' in plain
    assert "TypeError" in unwrapped and "call it after wrapping" in unwrapped
    assert "ValueError: qshard.prepare_for_fsdp1: gather is 'quantized' or 'param_dtype'" in gather


@on_ranks(2)
def test_without_the_private_method_all_is_gathered_in_full():
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    stock = FlatParamHandle._all_gather_flat_param
    FlatParamHandle._other_name = stock
    model = build_fsdp1("float8_blockwise", mixed_precision=BF16)
    handles = [u.handle for u in module_state.of(model).fsdp1.units]
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            del FlatParamHandle._all_gather_flat_param
            for _ in range(2):
                qshard.prepare_for_fsdp1(model)
        own = ["_all_gather_flat_param" in vars(handle) for handle in handles]
    finally:
        FlatParamHandle._all_gather_flat_param = stock
    loss_of(model, batch(0)).backward()
    own, said = own, [str(w.message) for w in said if "qshard" in str(w.message)]
    assert own == [False] * 3
    assert len(said) == 1 and "lacks what gather='quantized' replaces" in said[0]
