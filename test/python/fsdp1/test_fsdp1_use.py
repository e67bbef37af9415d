"""FSDP1 with weights quantized at each use, as loops use it between steps: evaluation, clipping, several
forwards of one backward, models made on meta, loads, resuming on other ranks."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from dist_helpers import device, on_ranks, on_worlds
from models.blocks import Branches, Model
from models.formats import DELAYED, MIXES, quantize_model
from models.fsdp1 import (
    BF16,
    BF16_POLICY,
    SENT_AS_CODES,
    build_fsdp1,
    build_fsdp2,
    check_as,
    check_gathers,
    different_values,
    full_values,
    load_then_step,
    make_dynamic,
    train_fsdp1,
    train_step,
    wrap,
)
from models.fsdp2 import shard
from models.plain_twins import make_plain
from models.training import adamw, batch, loss_of
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    StateDictType,
)

import qshard
from qshard.module_state import dynamic_of

BUDGET_S = 45
ORIG_OR_FLAT = pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")


# ------------------------------------------------------------------------------ between steps


def clip(model, norm):
    """Clips gradients of a model under FSDP1, or under FSDP2."""
    if isinstance(model, FSDP):
        return model.clip_grad_norm_(norm)
    return nn.utils.clip_grad_norm_(model.parameters(), norm).full_tensor()


def train_and_evaluate(model):
    """Losses and gradient norms."""
    optimizer, seen = adamw(model), []
    inference = torch.inference_mode if isinstance(model, FSDP) else torch.no_grad
    for train_step in range(3):
        with torch.no_grad():
            seen.append(loss_of(model, batch(train_step + 10)))
        losses = [loss_of(model, batch(train_step, microbatch)) for microbatch in range(2)]
        sum(losses).backward()
        seen += [*losses, clip(model, 0.01)]
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with inference():
            seen.append(loss_of(model, batch(train_step + 20)))
        model.train()
    return [value.item() for value in seen]


def run_between_steps(format, **kwargs):
    torch.manual_seed(0)
    is_exact = device().type == "cpu"
    if is_exact:
        oracle = wrap(make_plain(Model(format=format), format), **kwargs)
    else:
        oracle = build_fsdp2(format, strategy=kwargs["strategy"])
    model = build_fsdp1(format, **kwargs)
    check_as(train_and_evaluate(model), train_and_evaluate(oracle), model, oracle, is_exact)


@pytest.mark.pairwise
@ORIG_OR_FLAT
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("format", MIXES)
@on_ranks(4)
def test_evaluation_and_clipping(format, strategy, use_orig_params):
    """As plain parameters with the same arithmetic, on GPUs as quantized ones under FSDP2, whose norms have
    another order; two forwards have one backward."""
    run_between_steps(format, strategy=strategy, use_orig_params=use_orig_params)


@ORIG_OR_FLAT
@pytest.mark.parametrize("format", ["float8_blockwise", "float8_tensorwise"])
@on_ranks(3)
def test_evaluation_gathers_codes(format, use_orig_params):
    kwargs = dict(mixed_precision=BF16, use_orig_params=use_orig_params)
    model, other = build_fsdp1(format, **kwargs), build_fsdp1(format, **kwargs)
    losses = train_and_evaluate(model)
    assert losses[-1] < losses[0]
    assert check_gathers(model) == 5
    # What evaluation gathers changes nothing.
    optimizer = adamw(other)
    for train_step in range(3):
        sum(loss_of(other, batch(train_step, microbatch)) for microbatch in range(2)).backward()
        other.clip_grad_norm_(0.01)
        optimizer.step()
        optimizer.zero_grad()
    assert not different_values(model, other)


OPTIONS = {
    "forward-prefetch": dict(forward_prefetch=True),
    "backward-post": dict(backward_prefetch=BackwardPrefetch.BACKWARD_POST),
    "no-prefetch": dict(backward_prefetch=None),
    "unlimited": dict(limit_all_gathers=False),
}


@pytest.mark.each_value
@ORIG_OR_FLAT
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("format", SENT_AS_CODES)
@on_ranks(2)
def test_when_units_are_gathered_changes_nothing(format, option, use_orig_params):
    kwargs = dict(mixed_precision=BF16, use_orig_params=use_orig_params)
    model, other = build_fsdp1(format, **kwargs, **OPTIONS[option]), build_fsdp1(format, **kwargs)
    assert train_fsdp1(model) == train_fsdp1(other)
    assert check_gathers(model) == 5


HALF = MixedPrecision(param_dtype=torch.float16, keep_low_precision_grads=True)


@ORIG_OR_FLAT
@pytest.mark.parametrize("format", SENT_AS_CODES)
@on_ranks(2)
def test_half_precision_and_its_gradients(format, use_orig_params):
    model = build_fsdp1(format, mixed_precision=HALF, use_orig_params=use_orig_params)
    loss_of(model, batch(0)).backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float16}
    assert check_gathers(model) == 5
    norm = model.clip_grad_norm_(1.0)
    assert norm.dtype == torch.float16 and norm.isfinite()


@pytest.mark.parametrize("format", SENT_AS_CODES)
@on_ranks(3)
def test_units_of_two_dtypes(format):
    """A unit that computes in bf16 and gathers codes, in one that gathers all in full."""
    torch.manual_seed(0)
    model = make_dynamic(Model().to(device()), format)
    kwargs = dict(device_id=device(), use_orig_params=True)
    half, full = (
        MixedPrecision(param_dtype=dtype, cast_forward_inputs=True)
        for dtype in (torch.bfloat16, torch.float32)
    )
    model.blocks[0] = FSDP(model.blocks[0], mixed_precision=half, **kwargs)
    model.blocks[1] = FSDP(model.blocks[1], mixed_precision=full, **kwargs)
    model = qshard.prepare_for_fsdp1(FSDP(model, mixed_precision=full, **kwargs))
    losses = train_fsdp1(model, steps=4)
    assert losses[-1] < losses[0]
    assert check_gathers(model) == 2


@ORIG_OR_FLAT
@pytest.mark.parametrize("format", SENT_AS_CODES)
@on_ranks(2)
def test_parameters_in_double_precision(format, use_orig_params):
    """Parameters in fp64, with values of fp32: the same codes."""
    kwargs = dict(mixed_precision=BF16, use_orig_params=use_orig_params)
    single = build_fsdp1(format, **kwargs)
    torch.manual_seed(0)
    model = make_dynamic(Model(format=format).to(device()), format).double()
    model = qshard.prepare_for_fsdp1(wrap(model, **kwargs))
    losses = train_fsdp1(model, steps=4)
    assert losses[0] == train_fsdp1(single, steps=1)[0]
    assert losses[-1] < losses[0]
    assert check_gathers(model) == 5
    assert {value.dtype for value in full_values(model).values()} == {torch.float64}


# ---------------------------------------------------------------------------------- made on meta


def fill(module):
    """As reset_parameters, of values that depend on the shape alone."""
    module.to_empty(device=device(), recurse=False)
    for param in module.parameters(recurse=False):
        torch.nn.init.ones_(param)
        with torch.no_grad():
            param.div_(100).cumsum_(0).sin_()


@ORIG_OR_FLAT
@pytest.mark.parametrize("format", ["float8_blockwise", DELAYED])
@on_ranks(2)
def test_models_made_on_meta(format, use_orig_params):
    kwargs = dict(mixed_precision=BF16, use_orig_params=use_orig_params)
    with torch.device("meta"):
        model = make_dynamic(Model(), format)
    model = qshard.prepare_for_fsdp1(wrap(model, param_init_fn=fill, **kwargs))
    twin = make_dynamic(Model(), format)
    for module in twin.modules():
        fill(module)
    twin = qshard.prepare_for_fsdp1(wrap(twin, **kwargs))
    assert not different_values(model, twin)
    assert train_fsdp1(model) == train_fsdp1(twin)
    assert check_gathers(model) == 5


# ------------------------------------------------------------------------- loads, other ranks


def run_load_then_step(format, strategy, use_orig_params):
    model = build_fsdp1(format, strategy=strategy, use_orig_params=use_orig_params)
    twin = build_fsdp2(format, strategy=strategy)
    return load_then_step(model, format), load_then_step(twin, format), different_values(model, twin)


def check_load_then_step(world, *args):
    for losses, others, different in world.run(run_load_then_step, *args):
        assert losses == others and not different


@pytest.mark.pairwise
@ORIG_OR_FLAT
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("format", MIXES)
@on_worlds(1, 2)
def test_a_load_before_a_step_as_fsdp2(world, format, strategy, use_orig_params):
    check_load_then_step(world, format, strategy, use_orig_params)


@ORIG_OR_FLAT
@pytest.mark.parametrize("format", MIXES)
@on_worlds(4)
def test_a_load_before_a_step_as_hsdp(world, format, use_orig_params):
    check_load_then_step(world, format, "HYBRID_SHARD", use_orig_params)


def write_of_one_unit(model):
    with torch.no_grad(), FSDP.summon_full_params(model, recurse=False, writeback=True):
        for param in model.module.head.parameters():
            param.mul_(3)


@pytest.mark.each_value
@ORIG_OR_FLAT
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("format", SENT_AS_CODES)
@on_ranks(4)
def test_one_unit_is_written_in_full(format, strategy, use_orig_params):
    kwargs = dict(strategy=strategy, use_orig_params=use_orig_params, mixed_precision=BF16)
    model = build_fsdp1(format, **kwargs)
    train_fsdp1(model, steps=1)
    before = full_values(model)
    write_of_one_unit(model)
    after = full_values(model)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["head.weight"]
    assert torch.equal(after["head.weight"], before["head.weight"] * 3)
    train_fsdp1(model)
    assert check_gathers(model) == (0 if strategy == "NO_SHARD" else 5)


def full_state(model, optimizer):
    kinds = (
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=False),
        FullOptimStateDictConfig(rank0_only=False),
    )
    FSDP.set_state_dict_type(model, *kinds)
    return copy.deepcopy((model.state_dict(), FSDP.optim_state_dict(model, optimizer)))


@pytest.mark.parametrize("format", SENT_AS_CODES)
@on_ranks(4)
def test_resumed_on_other_ranks(format):
    """From 4 ranks to 2, twice, and back."""
    kwargs = dict(mixed_precision=BF16, use_orig_params=False)
    model = build_fsdp1(format, **kwargs)
    optimizer = adamw(model)
    train_step(model, optimizer, 0)
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    states = [full_state(model, optimizer)]
    for seed, group in ((1, pairs[dist.get_rank() // 2]), (2, None)):
        other = build_fsdp1(format, seed=seed, process_group=group, **kwargs)
        other_optimizer = adamw(other)
        FSDP.set_state_dict_type(other, StateDictType.FULL_STATE_DICT)
        other.load_state_dict(states[-1][0])
        loaded = FSDP.optim_state_dict_to_load(other, other_optimizer, states[-1][1])
        other_optimizer.load_state_dict(loaded)
        assert check_gathers(other) == 5
        states.append(full_state(other, other_optimizer))
    for name, value in states[0][0].items():
        assert torch.equal(value, states[1][0][name]) and torch.equal(value, states[2][0][name]), name
    for number in range(1, 3):
        assert train_step(model, optimizer, number) == train_step(other, other_optimizer, number)
    assert not different_values(model, other)


# ------------------------------------------------------------- weights without a gradient, ignored


def histories(model):
    with contextlib.ExitStack() as stack:
        if isinstance(model, FSDP):
            stack.enter_context(FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT))
        return {n: v.clone() for n, v in model.state_dict().items() if "amax" in n}


def train_with(model, optimizer, steps):
    return [train_step(model, optimizer, number) for number in range(steps)]


@ORIG_OR_FLAT
@pytest.mark.parametrize("mixed_precision", [False, True], ids=["fp32", "bf16"])
@on_ranks(2)
def test_histories_roll_where_those_of_fsdp2_do(mixed_precision, use_orig_params):
    torch.manual_seed(0)
    model = Branches([1, 0, 2, 0, 1]).to(device())
    twin = quantize_model(copy.deepcopy(model), DELAYED)
    twin = shard(twin, **(dict(mp_policy=BF16_POLICY) if mixed_precision else {}))
    kwargs = dict(use_orig_params=use_orig_params, mixed_precision=BF16 if mixed_precision else None)
    model = qshard.prepare_for_fsdp1(wrap(make_dynamic(model, DELAYED), **kwargs))
    for m in (model, twin):
        m.losses = train_with(m, torch.optim.SGD(m.parameters(), lr=0.1), steps=5)
    assert model.losses == twin.losses and not different_values(model, twin)
    tables, wanted = histories(model), histories(twin)
    assert tables.keys() == wanted.keys() and len(tables) == 12
    assert [name for name in tables if not torch.equal(tables[name], wanted[name])] == []


def run_branches_of_ranks(use_orig_params):
    """A weight of which one rank has a gradient has one on all."""
    torch.manual_seed(0)
    parts = [2, 2, 2, 2] if dist.get_rank() else [2, 2, 2, 1]
    model = wrap(make_dynamic(Branches(parts), DELAYED), use_orig_params=use_orig_params)
    model = qshard.prepare_for_fsdp1(model.to(device()))
    train_with(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=4)
    return {name: table.tolist() for name, table in histories(model).items()}


@ORIG_OR_FLAT
@on_worlds(2)
def test_branches_that_one_rank_takes(world, use_orig_params):
    tables, others = world.run(run_branches_of_ranks, use_orig_params)
    assert tables == others
    for name, steps in (("head", 1), ("other_head", 2)):  # of two that are kept
        for amaxes in tables[f"{name}.weight_amax_history"]:
            assert [amax > 0 for amax in amaxes] == [False, *[False] * (2 - steps), *[True] * steps]


def run_ignored(how, group_is_told, use_orig_params):
    """FSDP1 leaves the head alone; the training loop reduces its gradient."""
    torch.manual_seed(0)
    group = dist.group.WORLD if group_is_told else None
    model = make_dynamic(Model().to(device()), DELAYED, group=group)
    ignored = {"ignored_modules": [model.head], "ignored_states": [model.head.weight]}[how]
    model = wrap(model, use_orig_params=use_orig_params, mixed_precision=BF16, **{how: ignored})
    model = qshard.prepare_for_fsdp1(qshard.prepare_for_fsdp1(model))
    optimizer, losses = adamw(model), []
    for number in range(4):
        loss = loss_of(model, batch(number))
        loss.backward()
        dist.all_reduce(model.module.head.weight.grad.div_(dist.get_world_size()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return check_gathers(model), dynamic_of(model.module.head).state[0].tolist()


@pytest.mark.pairwise
@ORIG_OR_FLAT
@pytest.mark.parametrize("group_is_told", [False, True])
@pytest.mark.parametrize("how", ["ignored_modules", "ignored_states"])
@on_worlds(2)
def test_delayed_scaling_of_what_fsdp1_ignores(world, how, group_is_told, use_orig_params):
    (gathers, history), (_, other) = world.run(run_ignored, how, group_is_told, use_orig_params)
    assert gathers == 4 and history == other and all(max(row) > 0 for row in history)
