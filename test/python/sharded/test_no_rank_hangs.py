"""Whether a collective runs, and with whom, depends only on facts that are equal on all ranks: every
path with fewer rows than ranks, collectives counted, and what some ranks do alone.

A hang here is a failure within the process group's timeout, never a stuck run: what cannot work must
end in an error on every rank.
"""

import copy
import datetime
import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from collective_calls import collectives, count
from dist_helpers import (
    COLLECTIVE_TIMEOUT_S,
    COMPILERS_S,
    device,
    gather_objects,
    on_ranks,
    on_worlds,
    shared_folder,
)
from helpers import ops
from models.blocks import Model
from models.formats import FORMATS, MIXES, RECIPES
from models.fsdp2 import build, shard
from models.training import adamw, batch, loss_of, train
from models.weights import (
    check_gathered,
    different,
    full_value,
    is_dirty,
    local,
    local_values,
    quantized_parameters,
)

import qshard

BUDGET_S = 90  # one case waits for the process group's timeout
both_masters = pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
mixes = pytest.mark.parametrize("format", MIXES)


def scale_all(model, factor=1.5):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(factor)


# -------------------------------------------------------------------- ranks without rows


def step_after_backward(model, optimizer):
    loss_of(model, batch(0)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def scale_and_flush(model, _):
    scale_all(model)
    qshard.flush(model)


def read_values(model, _):
    torch.nn.utils.get_total_norm(model.parameters())
    for param in quantized_parameters(model).values():
        param.detach().to(torch.bfloat16).abs().sum().full_tensor()
        param.detach().clone()


def load_a_state_dict(model, _):
    copied = copy.deepcopy(model.state_dict())
    scale_all(model)
    model.load_state_dict(copied)


def load_a_checkpoint_and_step(model, optimizer):
    with shared_folder() as folder:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
        scale_all(model)
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
        loss_of(model, batch(0)).backward()
        check_flags_and_gathers(model)
    optimizer.step()


def reset(model, _):
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def write(model, _):
    scale_all(model)


PATHS = {
    "step": partial(train, steps=1),
    "accumulate": partial(train, steps=1, microbatches=2, synced=False),
    "no reshard": partial(train, steps=1, microbatches=2, resharded=False),
    "write": write,
    "flush": scale_and_flush,
    "clip": step_after_backward,
    "read": read_values,
    "state dict": load_a_state_dict,
    "checkpoint": load_a_checkpoint_and_step,
    "reset": reset,
}


def check_flags_and_gathers(model):
    flags = [is_dirty(param) for param in quantized_parameters(model).values()]
    assert len(set(map(tuple, gather_objects(flags)))) == 1
    assert check_gathered(model) == 5


@pytest.mark.pairwise
@both_masters
@mixes
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("path", [*PATHS, "all"])
@on_ranks(2, 4)
def test_a_path_with_fewer_rows_than_ranks_leaves_them_agreed(path, rows, format, keep_master):
    model = build(format, keep_master=keep_master, rows=rows)
    optimizer = adamw(model)
    check_flags_and_gathers(model)
    for name in PATHS if path == "all" else [path]:
        PATHS[name](model, optimizer)
        check_flags_and_gathers(model)


@pytest.mark.pairwise
@both_masters
@mixes
@pytest.mark.parametrize("before_first_gather", [True, False], ids=["before-gather", "after-gather"])
@on_ranks(2, 4)
def test_reads_on_one_rank(before_first_gather, format, keep_master):
    """One rank looks at its shard of a one-row weight, which looks whole there; others do not."""
    model = build(format, keep_master=keep_master, rows=1)
    if not before_first_gather:
        train(model, steps=1)
    scale_all(model)
    want = {name: full_value(param) for name, param in quantized_parameters(model).items()}
    if dist.get_rank() == 0:
        rows = local(model.blocks[0].up.weight).detach()
        try:
            ops.codes(rows), ops.scale_inv(rows)
        except RuntimeError as error:
            assert "qshard.flush(model)" in str(error)
        rows + 0, repr(rows), copy.deepcopy(rows), rows.untyped_storage()
    check_gathered(model, want)
    train(model, steps=1)
    check_gathered(model)


@mixes
@on_ranks(2)
def test_codes_wait_for_a_write_of_rows_that_one_rank_has(format):
    """Codes may be read on all ranks or on none: what they are is for the flush to say."""
    model = build(format, rows=5)
    train(model, steps=1)
    qshard.flush(model)
    weight = local(model.blocks[0].up.weight).detach()
    ops.codes(weight)
    weight[:1 if dist.get_rank() == 0 else 0].mul_(1.5)
    with pytest.raises(RuntimeError, match=r"Call qshard\.flush"):
        ops.codes(weight)
    qshard.flush(model)
    ops.codes(weight)
    check_gathered(model)


# ------------------------------------------------------------------------------ optimizers


@on_ranks(2, 4)
def test_one_all_reduce_per_optimizer_step():
    model = build("float8_blockwise", rows=5)
    first = torch.optim.AdamW(model.blocks[0].parameters(), lr=1e-2)
    second = torch.optim.SGD([*model.blocks[1].parameters(), *model.head.parameters()], lr=1e-2)
    with collectives() as calls:
        for step in range(4):
            loss_of(model, batch(step)).backward()
            first.step()
            if step % 2:
                second.step()
            model.zero_grad()
    check_gathered(model)
    assert count(calls, "allreduce") == 4 + 2


@on_ranks(2)
def test_a_model_is_collected_on_one_rank_only():
    kept, dropped = (build("float8_blockwise", rows=5) for _ in range(2))
    train(dropped, steps=1)
    optimizer = adamw(kept)
    train(kept, optimizer, steps=1)
    if dist.get_rank() == 0:
        del dropped
        gc.collect()
    train(kept, optimizer, steps=1, first_step=1)
    check_gathered(kept)


@on_ranks(2, 4)
def test_parameter_without_gradient():
    model = build("float8_blockwise", rows=5)
    optimizer = adamw(model)
    loss_of(model, batch(0)).backward()
    model.blocks[0].up.weight.grad = None
    with collectives() as calls:
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # no gradients at all
    check_gathered(model)
    assert count(calls, "allreduce") == 1


@pytest.mark.parametrize("rows", [3, 257])
@on_ranks(2, 4)
def test_skipped_step_has_no_all_reduce(rows):
    """An infinite loss on one rank: all ranks skip the step, and its all-reduce."""
    model = build("float8_blockwise", rows=rows)
    optimizer, scaler = adamw(model), torch.amp.GradScaler(device().type, init_scale=4.0)
    counts = []
    for step in range(3):
        loss = loss_of(model, batch(step))
        if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = local_values(model)
        with collectives() as calls:
            scaler.step(optimizer)
        skipped = gather_objects(not different(local_values(model), before))
        assert all(skipped) == any(skipped) == (step == 1)
        counts.append(count(calls, "allreduce"))
        scaler.update()
        optimizer.zero_grad()
        check_gathered(model)
    assert counts[0] == counts[1] + 1 == counts[2]


def run_like_twin(keep_master, wrap, make_optimizer=adamw):
    """Steps through `wrap` equal plain steps, and so do forwards in inference_mode."""
    model = build("float8_blockwise", keep_master=keep_master, rows=5)
    twin = build("float8_blockwise", keep_master=keep_master, rows=5)
    optimizer, twin_optimizer = make_optimizer(model), make_optimizer(twin)
    step = wrap(optimizer.step)
    for index in range(3):
        for trained in (model, twin):
            loss_of(trained, batch(index)).backward()
        step()
        twin_optimizer.step()
        model.zero_grad()
        twin.zero_grad()
        check_gathered(model)
        assert not different(local_values(model), local_values(twin))
        with torch.inference_mode():
            outputs = model(batch(9)), twin(batch(9))
        assert torch.equal(*outputs)


def fused_adamw(model):
    return adamw(model, fused=True)


def foreach_sgd(model):
    # Not AdamW: its bias correction is in other precision when compiled, plain parameters or not.
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)


@both_masters
@on_ranks(1, 2, 4)
def test_steps_in_inference_mode_are_the_same(keep_master):
    run_like_twin(keep_master, torch.inference_mode())


@both_masters
@pytest.mark.parametrize(
    "backend, make_optimizer",
    [
        ("eager", foreach_sgd),
        ("aot_eager", foreach_sgd),
        ("aot_eager", fused_adamw),
        ("inductor", fused_adamw),
    ],
    ids=["eager-foreach", "aot_eager-foreach", "aot_eager-fused", "inductor-fused"],
)
@on_ranks(2)
def test_compiled_steps_are_the_same(backend, make_optimizer, keep_master):
    run_like_twin(keep_master, lambda step: torch.compile(step, backend=backend), make_optimizer)


# ------------------------------------------------------------------------------- gathered


@pytest.mark.pairwise
@both_masters
@mixes
@on_ranks(1, 2)
def test_step_leaves_living_gathered_weights_alone(format, keep_master):
    """Shards are stepped while their gathered weights live: those keep their values."""
    model = build(format, keep_master=keep_master, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    model.set_reshard_after_backward(False)
    loss_of(model, batch(0)).backward()
    weights = quantized_parameters(model)
    assert not any(isinstance(w, torch.distributed.tensor.DTensor) for w in weights.values())
    before = {name: ops.dequantize(w.detach()) for name, w in weights.items()}
    optimizer.step()
    assert not different(before, {n: ops.dequantize(w.detach()) for n, w in weights.items()})
    assert not different(before, {n: w.detach() + 0 for n, w in weights.items()})
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    check_gathered(model)
    assert different(before, {n: full_value(p) for n, p in quantized_parameters(model).items()})


# ---------------------------------------------------------------- what some ranks do alone


@pytest.mark.parametrize("rows", [1, 257])
@on_ranks(2, 4)
def test_flush_after_a_write_on_one_rank(rows):
    """qshard.flush() asks all ranks what was written on any."""
    model = build("float8_blockwise", rows=rows)
    train(model, steps=1)
    if dist.get_rank() == 0:
        with torch.no_grad():
            local(model.blocks[0].up.weight).mul_(4.0)
    qshard.flush(model)
    check_gathered(model)


def write_on_one_rank():
    model = build("float8_blockwise")
    train(model, steps=1)
    if dist.get_rank() == 0:
        with torch.no_grad():
            local(model.blocks[0].up.weight).mul_(4.0)
    train(model, steps=2)


def step_that_raises():
    model = build("float8_blockwise")
    optimizer = adamw(model)
    if dist.get_rank() == 1:
        optimizer.register_step_pre_hook(fail)
    train(model, optimizer, steps=2)


def fail(*_):
    raise ValueError("this rank fails")


def train_quantized(recipe, sharded_first):
    model = Model().to(device())
    if sharded_first:
        shard(model)
    qshard.quantize_(model, recipe)
    if not sharded_first:
        shard(model)
    train(model, steps=2)


def bad_recipe(sharded_first):
    recipe = "fp8" if dist.get_rank() == 1 else RECIPES["float8_blockwise"]
    train_quantized(recipe, sharded_first)


def different_recipes(sharded_first):
    train_quantized(RECIPES[FORMATS[dist.get_rank() % 2]], sharded_first)


@pytest.mark.parametrize(
    "function, args, cause",
    [
        (step_that_raises, (), "this rank fails"),
        (bad_recipe, (False,), "expected a recipe"),
        (bad_recipe, (True,), "expected a recipe"),
        (different_recipes, (False,), None),
        (different_recipes, (True,), None),
        (write_on_one_rank, (), None),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@on_worlds(2)
def test_every_rank_ends_with_an_error(world, function, args, cause):
    outcomes = world.outcomes(function, *args, wait_s=8 * COLLECTIVE_TIMEOUT_S)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error, f"rank {rank} did not notice"
        assert "no answer" not in outcome.error
        assert outcome.seconds < COLLECTIVE_TIMEOUT_S + 15
    if cause:
        assert cause in outcomes[1].error


@on_ranks(2, devices=("cpu",), compiles=True)
def test_ranks_that_compile_wait_for_each_other():
    options = dist.group.WORLD._get_backend(device()).options
    assert options._timeout == datetime.timedelta(seconds=COMPILERS_S)
