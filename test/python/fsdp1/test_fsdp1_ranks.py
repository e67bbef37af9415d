"""FSDP1 with weights quantized at each use: a rank may write, or run, what others do not, where FSDP1
itself lets it."""

import pytest
import torch
import torch.distributed as dist
from collective_calls import collectives, count
from dist_helpers import device, on_ranks, on_worlds
from models.blocks import Branches
from models.formats import DELAYED
from models.fsdp1 import BF16, build_fsdp1, check_gathers, make_dynamic, train_fsdp1, wrap
from models.training import adamw, batch, loss_of
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import qshard
from qshard import module_state

BUDGET_S = 45
FORMATS = pytest.mark.parametrize("format", ["float8_blockwise", DELAYED])


def write_a_full_copy(model):
    """Which ends with the block."""
    with FSDP.summon_full_params(model, rank0_only=True, writeback=False), torch.no_grad():
        if dist.get_rank() == 0:
            for param in model.parameters():
                param.mul_(3)


def freeze_what_rank_0_has(model):
    """Freezes parts of blocks: rank 0 has no gradient there, and the other rank has."""
    for block in model.blocks:
        block.norm.requires_grad_(False)
        block.up.requires_grad_(False)


def step_by_hand(model):
    """A rank without trained elements of a unit writes nothing of it."""
    loss_of(model, batch(3)).backward()
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.sub_(100 * param.grad)
                param.grad = None


def scale_what_is_here(model):
    """Without a backward before."""
    with torch.no_grad():
        for param in model.parameters():
            if param.numel() and param.requires_grad:
                param.mul_(5)


def scale_on_one_rank(model):
    if dist.get_rank() == 1:
        scale_what_is_here(model)


WRITES = (write_a_full_copy, step_by_hand, scale_what_is_here, scale_on_one_rank)


@pytest.mark.parametrize("write", WRITES)
@FORMATS
@on_ranks(2)
def test_a_write_on_some_ranks_is_noticed_by_all(format, write):
    model = build_fsdp1(format, mixed_precision=BF16, prepare=freeze_what_rank_0_has)
    train_fsdp1(model, steps=2)
    write(model)
    loss_of(model, batch(5))
    assert check_gathers(model) == 5
    train_fsdp1(model, steps=1)
    assert check_gathers(model) == 5


@FORMATS
@on_ranks(2)
def test_a_unit_may_be_called_alone(format):
    """Without the root's forward, which meets for all units at once."""
    model = build_fsdp1(format, rows=3, mixed_precision=BF16)
    train_fsdp1(model, steps=1)
    scale_on_one_rank(model)
    with torch.no_grad(), collectives() as calls:
        model.module.blocks[0](batch(0).bfloat16())
    assert count(calls, "allreduce") == 1
    with collectives() as calls:
        loss_of(model, batch(0)).backward()
    assert count(calls, "allreduce") == 1
    assert check_gathers(model) == 5


def run_whole_weights():
    """NO_SHARD gathers nothing: one rank alone may evaluate, after a write that all made."""
    model = build_fsdp1(DELAYED, strategy="NO_SHARD")
    train_fsdp1(model, steps=2)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3)
        losses = [loss_of(model, batch(1, rank=0)) for _ in range(2)] if dist.get_rank() == 0 else []
        losses.append(loss_of(model, batch(1, rank=0)))
    train_fsdp1(model, optimizer=adamw(model), steps=1)
    return [loss.item() for loss in losses]


@on_worlds(2)
def test_one_rank_evaluates_whole_weights(world):
    (a, b, c), (other,) = world.run(run_whole_weights)
    assert a == b == c == other


# ------------------------------------------------------------------ optimizers of a rank's pieces


def train_pieces(parts, is_held):
    """Histories of a model whose rank 0 has the head's piece, and rank 1 that of the other head."""
    torch.manual_seed(0)
    model = wrap(make_dynamic(Branches(parts), DELAYED).to(device()))
    qshard.prepare_for_fsdp1(model)
    held = [param for name, param in model.named_parameters() if is_held(name, param)]
    optimizer = torch.optim.SGD(held, lr=0.1)
    for number in range(len(parts)):
        loss_of(model, batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [dynamic.state[0].tolist() for _, dynamic in module_state.dynamics_of(model)]


def run_pieces(other_rank_uses):
    """The rank that has the piece of a weight steps it, with the gradient of the rank that has used it."""
    uses = other_rank_uses[dist.get_rank()]
    pieces = train_pieces([uses] * 4, lambda name, param: param.numel() > 0)
    assert pieces == train_pieces([uses] * 4, lambda name, param: True)
    return pieces


@pytest.mark.parametrize("other_rank_uses", [(2, 1), (1, 2), (2, 2)], ids=["other", "own", "same"])
@on_worlds(2)
def test_a_step_of_pieces_is_of_the_weight_on_all_ranks(world, other_rank_uses):
    histories, others = world.run(run_pieces, other_rank_uses)
    assert histories == others and any(max(row) > 0 for history in histories for row in history)


def hold_one_block(name, param):
    """Rank 0 holds pieces of one unit alone, and rank 1 of all."""
    return param.numel() > 0 and (dist.get_rank() == 1 or "blocks.0" in name)


def run_few_units():
    """What histories took up in steps; what they collect is each rank's own until there is a step."""
    histories = train_pieces([1] * 3, hold_one_block)
    return [row[1:] for history in histories for row in history]


@on_worlds(2)
def test_ranks_meet_for_units_that_one_of_them_holds_nothing_of(world):
    rows, others = world.run(run_few_units)
    assert rows == others and any(max(row) > 0 for row in rows)

