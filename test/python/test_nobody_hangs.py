"""I7: whether a collective runs depends only on facts equal on all ranks. A hang here is a failure
within the process group's timeout, never a stuck run."""

import gc

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist_helpers import COLLECTIVE_TIMEOUT_S, device, gather_objects, on_worlds, shared_folder
from dist_models import (
    FORMATS,
    RECIPES,
    adamw,
    batch,
    build,
    check_gathered,
    full_value,
    image_bytes,
    local,
    loss_of,
    quantized_parameters,
    shard,
    train,
    unsharded,
)
from torch import nn

import qshard

ops = torch.ops.qshard


# ------------------------------------------------------------------ fewer rows than ranks


def few_rows(format, rows, keep_master, optimizer_kwargs):
    model = build(format, rows=rows, keep_master=keep_master)
    train(model, adamw(model, **optimizer_kwargs), microbatches=2)
    checked = check_gathered(model) if keep_master else 0
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    qshard.flush(model)
    return checked + (check_gathered(model) if keep_master else 0)


@on_worlds(2, 4)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 3])
def test_fewer_rows_than_ranks(world, format, rows):
    for keep_master in (True, False):
        for kwargs in ({"foreach": True}, {"fused": True}, {"foreach": False, "fused": False}):
            checked = world.run(few_rows, format, rows, keep_master, kwargs)
            assert len(set(checked)) == 1


def in_place_load(format, rows, keep_master):
    model = build(format, rows=rows, keep_master=keep_master)
    train(model, steps=1)
    saved = {name: full_value(p) for name, p in quantized_parameters(model).items()}
    with shared_folder() as folder:
        dcp.save(model.state_dict(), checkpoint_id=folder)
        train(model, steps=1, first_step=1)
        dcp.load(model.state_dict(), checkpoint_id=folder)
        loss_of(model, batch(0)).backward()
    for name, param in quantized_parameters(model).items():
        assert torch.equal(full_value(param), saved[name]), name
    return check_gathered(model) if keep_master else 0


@on_worlds(2, 4)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 3])
def test_in_place_load_with_fewer_rows_than_ranks_then_forward(world, format, rows):
    for keep_master in (True, False):
        world.run(in_place_load, format, rows, keep_master)


# ------------------------------------------------------------------------------ steps


def two_optimizers(format):
    model = build(format)
    first = torch.optim.AdamW(model.blocks[0].parameters(), lr=1e-2)
    second = torch.optim.SGD([*model.blocks[1].parameters(), *model.head.parameters()], lr=1e-2)
    for step in range(4):
        loss_of(model, batch(step)).backward()
        first.step()
        if step % 2:
            second.step()
        model.zero_grad()
    return check_gathered(model)


@on_worlds(2)
@pytest.mark.parametrize("format", FORMATS)
def test_two_optimizers_one_of_which_skips_steps(world, format):
    world.run(two_optimizers, format)


def skipped_by_grad_scaler(format):
    model = build(format)
    optimizer = adamw(model, fused=True)
    scaler = torch.amp.GradScaler(device().type, init_scale=4.0)
    before = {n: full_value(p) for n, p in quantized_parameters(model).items()}
    loss = loss_of(model, batch(0))
    if dist.get_rank() == 0:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    for name, param in quantized_parameters(model).items():
        assert torch.equal(full_value(param), before[name]), name
    loss_of(model, batch(1)).backward()
    scaler.step(optimizer)
    scaler.update()
    return check_gathered(model)


@on_worlds(2)
@pytest.mark.parametrize("format", FORMATS)
def test_grad_scaler_skips_on_an_inf(world, format):
    world.run(skipped_by_grad_scaler, format)


def collected_on_one_rank(format):
    kept, dropped = build(format), build(format)
    train(dropped, steps=1)
    optimizer = adamw(kept)
    train(kept, optimizer, steps=1)
    if dist.get_rank() == 0:
        del dropped
        gc.collect()
    train(kept, optimizer, steps=1, first_step=1)
    return check_gathered(kept)


@on_worlds(2)
def test_a_model_is_collected_on_one_rank_only(world):
    world.run(collected_on_one_rank, "float8_blockwise")


def inference_mode_step(format):
    model = build(format)
    optimizer = adamw(model)
    train(model, optimizer, steps=1)  # optimizer states made in inference_mode would stay there
    loss_of(model, batch(0)).backward()
    with torch.inference_mode():
        optimizer.step()
    optimizer.zero_grad()
    with torch.inference_mode():
        loss_of(model, batch(1))
    train(model, optimizer, steps=1, first_step=1)
    return check_gathered(model)


@on_worlds(2)
@pytest.mark.parametrize("format", FORMATS)
def test_a_step_under_inference_mode(world, format):
    world.run(inference_mode_step, format)


def flush_while_gathered(format):
    model = build(format)
    train(model, steps=1)
    shards = [p for p in model.parameters() if qshard.is_quantized(p)]
    with unsharded(model):
        weights = {n: w.detach() for n, w in quantized_parameters(model).items()}
        before = {n: (image_bytes(w).clone(), ops.dequantize(w)) for n, w in weights.items()}
        with torch.no_grad():
            for param in shards:
                param.mul_(4.0)
        ops.flush([local(p) for p in shards])
        for name, weight in weights.items():
            assert torch.equal(image_bytes(weight), before[name][0]), name
            assert torch.equal(ops.dequantize(weight), before[name][1]), name
    return check_gathered(model)


@on_worlds(2)
@pytest.mark.parametrize("format", FORMATS)
def test_a_flush_leaves_living_gathered_weights_alone(world, format):
    world.run(flush_while_gathered, format)


def compiled_step(format):
    model = build(format)
    optimizer = adamw(model, fused=True)
    step = torch.compile(optimizer.step)
    for index in range(2):
        loss_of(model, batch(index)).backward()
        step()
        optimizer.zero_grad()
    return check_gathered(model)


@on_worlds(2, devices=("cpu",))
def test_a_compiled_optimizer_step(world):
    world.run(compiled_step, "float8_blockwise")


def write_on_one_rank(format):
    model = build(format)
    if dist.get_rank() == 0:
        with torch.no_grad():
            model.head.weight.to_local().mul_(2.0)
    qshard.flush(model)
    return check_gathered(model)


@on_worlds(2)
@pytest.mark.parametrize("format", FORMATS)
def test_flush_heals_a_write_made_on_one_rank(world, format):
    world.run(write_on_one_rank, format)


# --------------------------------------------------------------------------- failing ranks


def exception_in_one_step(format):
    model = build(format)
    optimizer = adamw(model)
    loss_of(model, batch(0)).backward()
    if dist.get_rank() == 0:
        raise RuntimeError("out of memory, say")
    optimizer.step()
    gather_objects("never")


def bad_recipe_on_one_rank():
    torch.manual_seed(0)
    model = shard(nn.Sequential(nn.Linear(32, 32)).to(device()))
    recipe = "float9" if dist.get_rank() == 0 else RECIPES["float8_blockwise"]
    qshard.quantize_(model, recipe)
    gather_objects("never")


@on_worlds(2, devices=("cpu",))
@pytest.mark.parametrize(
    "function,args,message",
    [
        (exception_in_one_step, ("float8_blockwise",), "out of memory, say"),
        (bad_recipe_on_one_rank, (), "expected a recipe"),
    ],
    ids=["exception", "recipe"],
)
def test_an_error_on_one_rank_ends_all_ranks(world, function, args, message):
    outcomes = world.outcomes(function, *args, wait_s=3 * COLLECTIVE_TIMEOUT_S)
    assert message in outcomes[0].error
    assert outcomes[1].error and "no answer" not in outcomes[1].error
