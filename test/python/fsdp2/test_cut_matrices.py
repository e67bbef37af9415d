"""Stacks of matrices of which each rank has some rows of every matrix: FSDP2's Shard(1), which torchtitan takes
where there are more ranks than experts, and tensor parallelism inside of experts.

FSDP2's shards are rows of whole matrices: what is gathered has the bytes of one device, also where a cut lies
inside a block. Tensor parallelism makes matrices of their own of the parts, as it does of other weights.
"""

import contextlib
import copy
import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from dist_helpers import device, full_mesh, on_ranks, on_worlds, shared_folder
from collective_calls import Sent
from helpers import ops, row_bytes
from models.formats import FORMATS, RECIPES
from models.tensor_parallel import give_gradient, local_part
from models.weights import local, mismatching_bytes, unsharded
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import qshard

BUDGET_S = 60
SHAPES = {"up": (3, 40, 80), "down": (2, 256, 48), "one": (1, 16, 160)}
FITTING = tuple(format for format in FORMATS if row_bytes(format, 80) == 80)



def values(name, seed):
    """Magnitudes differ by matrix, row and column."""
    shape = SHAPES[name]
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(shape, generator=generator)
    for dim, size in enumerate(shape):
        sizes = [1] * 3
        sizes[dim] = size
        value *= 2.0 ** torch.randint(-3, 4, sizes, generator=generator)
    return value.to(device())


class Stacks(nn.Module):
    def __init__(self):
        super().__init__()
        for seed, name in enumerate(SHAPES):
            setattr(self, name, nn.Parameter(values(name, seed)))


def quantize(model, format, **options):
    qshard.quantize_(model, RECIPES[format], parameter_fn=lambda *_: True, **options)


def shard(model, mesh, dim=1):
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda _: Shard(dim))


def build(mesh, format, order, **options):
    model = Stacks()
    torch.manual_seed(0)  # keys of stochastic rounding come from it
    for action in order:
        if action == "q":
            quantize(model, format, **options)
        elif action == "s":
            step(model, None)
        else:
            shard(model, mesh)
    return model


def step(model, seed):
    """An optimizer step, without a seed of gradients that are zero."""
    for number, (name, param) in enumerate(model.named_parameters()):
        grad = torch.zeros(param.shape, device=device()) if seed is None else values(name, seed + number).flip(0)
        give_gradient(param, grad)
    torch.optim.SGD(model.parameters(), lr=0.5, foreach=False).step()
    model.zero_grad()


def write(model, seed):
    with torch.no_grad():
        for number, (name, param) in enumerate(model.named_parameters()):
            full = values(name, seed + number)
            local(param).copy_(local_part(full, param) if isinstance(param, DTensor) else full)
    qshard.flush(model)


def mismatches(model, whole):
    with unsharded(model):
        wrong = {
            name: mismatching_bytes(local(getattr(model, name)).detach(), getattr(whole, name).detach())
            for name in SHAPES
        }
    return {name: count for name, count in wrong.items() if count}


def run_bits(format, order, actions, options):
    mesh = full_mesh(dist.get_world_size())
    model, whole = build(mesh, format, order, **options), build(None, format, order.replace("f", ""), **options)
    wrong = {}
    for number, action in enumerate(actions):
        for each in (model, whole):
            if action == "step":
                step(each, 10 * number)
            elif action == "write":
                write(each, 10 * number)
        if action == "gather":
            wrong[number] = mismatches(model, whole)
    wrong["end"] = mismatches(model, whole)
    return {key: names for key, names in wrong.items() if names}


ACTIONS = tuple(itertools.permutations(("gather", "step", "write")))


@pytest.mark.parametrize("format", FITTING)
@on_worlds(2, 4)
def test_gathered_bytes_are_those_of_whole_stacks(world, format):
    for order, actions in itertools.product(("qf", "fq", "qsf"), ACTIONS[:: 5 if world.size == 4 else 2]):
        assert world.run(run_bits, format, order, actions, {}) == [{}] * world.size, (order, actions)


@on_worlds(2)
def test_gathered_bytes_without_a_master(world):
    for format, stochastic in itertools.product(FITTING, (False, True)):
        options = {"keep_master": False, "stochastic_rounding": stochastic}
        for order in ("qf", "fq"):
            assert world.run(run_bits, format, order, ("gather", "step"), options) == [{}] * world.size


def test_formats_that_fit():
    assert set(FITTING) == {
        "float8_tensorwise", "float8_delayed[history=3]", "float8_rowwise", "float8_blockwise"
    }


@on_ranks(2)
def test_other_formats_and_matrices_are_refused_before_anything_changes():
    mesh = full_mesh(2)
    for format in set(FORMATS) - set(FITTING):
        model = Stacks()
        del model.up, model.one  # rows of down suit all formats
        quantize(model, format)
        with pytest.raises(NotImplementedError, match=r"cuts each matrix of this .* stack .*Return Shard\(0\)"):
            shard(model, mesh)
        later = Stacks()
        del later.up, later.one
        shard(later, mesh)
        with pytest.raises(NotImplementedError, match=r"cuts each matrix of this .* stack .*Return Shard\(0\)"):
            quantize(later, format)
        assert not qshard.is_quantized(later.down)
    narrow = nn.Module()
    narrow.odd = nn.Parameter(torch.randn(2, 32, 40))  # 40 codes lie in 48 bytes
    quantize(narrow, "float8_blockwise")
    with pytest.raises(NotImplementedError, match="rows of a multiple of 16 elements"):
        shard(narrow, mesh)
    matrix = nn.Module()
    matrix.weight = nn.Parameter(torch.randn(32, 64))
    quantize(matrix, "float8_blockwise")
    with pytest.raises(NotImplementedError, match="sharded by another dimension than its rows"):
        shard(matrix, mesh)


class Experts(nn.Module):
    """Tokens (experts, tokens, 64), of all experts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(3, 176, 64) / 8)
        self.down = nn.Parameter(torch.randn(3, 64, 176) / 8)

    def forward(self, x):
        return torch.bmm(F.gelu(torch.bmm(x, self.up.transpose(1, 2))), self.down.transpose(1, 2))


def experts(format="float8_blockwise", mesh=None, dim=1, **options):
    model = Experts().to(device())
    quantize(model, format, **options)
    if mesh is not None:
        shard(model, mesh, dim)
    return model


def train(model, optimizer, steps=3, ranks=(0, 1)):
    losses = []
    for step_number in range(steps):
        each = []
        for rank in ranks:
            generator = torch.Generator().manual_seed(10 * step_number + rank)
            each.append(model(torch.randn(3, 8, 64, generator=generator).to(device())).square().mean())
            (each[-1] / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    return losses


@pytest.mark.parametrize("fused", (False, True), ids=("foreach", "fused"))
@on_ranks(2)
def test_training_is_that_of_one_device(fused):
    mesh, rank = full_mesh(2), dist.get_rank()
    for format in FITTING:
        model, whole = experts(format, mesh), experts(format)
        losses = [
            train(each, torch.optim.AdamW(each.parameters(), lr=1e-2, fused=fused), ranks=ranks)
            for each, ranks in ((model, [rank]), (whole, [0, 1]))
        ]
        for got, want in zip(*losses):
            assert got[0] == pytest.approx(want[rank], rel=2e-3), format
        for param in model.parameters():
            assert qshard.is_quantized(param) and param.placements == (Shard(1),)


@on_ranks(2)
def test_a_gather_sends_a_byte_per_element():
    model = experts(mesh=full_mesh(2))
    with Sent() as sent:
        model(torch.randn(3, 8, 64, device=device()))
    assert sent.gathered == [(torch.uint8, 2 * 3 * 88 * 64)]
    sent = qshard.report(model).sent()
    assert sent.weights == 2 * 3 * 88 * 64  # a root's weights stay gathered until backward


@on_ranks(2)
def test_copies_files_and_states(tmp_path):
    mesh = full_mesh(2)
    model = experts(mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, ranks=[dist.get_rank()])
    part = local(model.up).detach()
    file = tmp_path / f"part-{dist.get_rank()}.pt"
    torch.save(part, file)
    alike = {
        "clone": part.clone(),
        "deepcopy": copy.deepcopy(part),
        "file": torch.load(file, weights_only=False),
        "to": part.to(torch.float32, copy=True),
        "new": torch.empty_like(part).copy_(part),
    }
    for name, other in alike.items():
        assert qshard.is_quantized(other), name
        for plane in (ops.codes, ops.scale_inv, ops.dequantize):
            assert torch.equal(plane(other).float(), plane(part).float()), name
    rank = dist.get_rank()
    assert torch.equal(ops.dequantize(part[1]), ops.dequantize(part)[1])  # rows of one matrix
    assert torch.equal(ops.dequantize(part[1:, 3:60]), ops.dequantize(part)[1:, 3:60])
    with unsharded(model):
        whole = local(model.up).detach()
        mine = slice(88 * rank, 88 * rank + 88)
        assert torch.equal(ops.dequantize(whole)[:, mine], ops.dequantize(part))
        assert torch.equal(ops.scale_inv(whole)[:, :1] if rank == 0 else ops.scale_inv(whole), ops.scale_inv(part))
    with pytest.raises(RuntimeError, match="this rank has 88 of 176 rows of each matrix"):
        ends = torch.tensor([1, 2, 4], dtype=torch.int32, device=device())
        ops.grouped_linear(torch.randn(4, 64, device=device()), part, ends)
    state = model.state_dict()["up"]
    assert type(local(state)) is torch.Tensor and state.placements == (Shard(1),)
    other = experts(mesh=mesh)
    masters = ops.master(local(other.up).detach()).clone()
    qshard.dequantize_(other)
    assert torch.equal(local(other.up), masters) and not qshard.is_quantized(other.up)


@on_ranks(2)
def test_checkpoints_go_between_placements():
    with shared_folder() as folder:
        check_checkpoints(folder)


def check_checkpoints(folder):
    mesh = full_mesh(2)
    model = experts(mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, ranks=[dist.get_rank()])
    saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=folder)
    losses = train(model, optimizer, ranks=[dist.get_rank()])
    for dim in (1, 0):
        other = experts(mesh=mesh, dim=dim)
        with torch.no_grad():
            for param in other.parameters():
                local(param).zero_()
        again = torch.optim.AdamW(other.parameters(), lr=1e-2)
        state = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, again)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(other, state["model"])
        set_optimizer_state_dict(other, again, optim_state_dict=state["optimizer"])
        assert train(other, again, ranks=[dist.get_rank()]) == losses, dim


@on_ranks(4)
def test_experts_that_are_handed_out_before():
    """As torchtitan places experts on more ranks than there are: whole matrices over ep, and rows of each over
    efsdp."""
    mesh = full_mesh(2, 2, names=("efsdp", "ep"))
    for format, order in itertools.product(FITTING, ("dqf", "dfq")):
        model, whole = Stack(), Stack()
        quantize(whole, format)
        for action in order:
            if action == "d":
                model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["ep"], [Shard(0)]))
            elif action == "q":
                quantize(model, format, tp_mesh=mesh["ep"])
            else:
                shard(model, mesh["efsdp"])
        assert model.weight.placements == (Shard(1), Shard(0))
        for _ in range(2):
            with unsharded(model):
                mine = ops.dequantize(whole.weight.detach()).chunk(2)[mesh.get_local_rank("ep")]
                assert torch.equal(ops.dequantize(local(model.weight).detach()), mine), (format, order)
            for each in (model, whole):
                give_gradient(each.weight, torch.randn(CUT, generator=torch.Generator().manual_seed(2)).to(device()))
                torch.optim.AdamW(each.parameters(), lr=0.5).step()


@on_ranks(2)
def test_gradients_in_one_byte():
    model, whole = qshard.reduce_gradients_(experts(mesh=full_mesh(2)), "float8"), experts()
    losses = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), ranks=[dist.get_rank()])
    want = train(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2))
    for got, both in zip(losses, want):
        assert got[0] == pytest.approx(both[dist.get_rank()], rel=0.02)


@on_ranks(2)
def test_a_watch_sees_what_one_device_sees():
    seen = []
    for mesh in (full_mesh(2), None):
        model = experts(mesh=mesh)
        with qshard.watch(model, every=1) as watch:
            train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 1, [dist.get_rank()] if mesh else (0, 1))
        seen.append({name: dataclasses.asdict(row.weight) for name, row in watch.last.items()})
    cut, whole = seen
    assert cut.keys() == whole.keys() == {"up", "down"}
    for name, weight in cut.items():
        held = 3 * 176 * 64 // 2  # codes that each rank has; scales are all on both
        assert weight.pop("bytes") == whole[name].pop("bytes") - held
        assert weight == pytest.approx(whole[name], rel=1e-3), name


@on_ranks(4)
def test_errors_are_those_of_all_ranks():
    """What ranks know apart from each other decides nothing: parts of unequal width, one expert on two ranks, and a mesh
    that was not named."""
    mesh = full_mesh(2, 2, names=("dp", "tp"))
    cases = (
        ((2, 4, 33), 2, 1, True, "rows of a multiple of 16 elements"),
        ((1, 32, 48), 0, 1, False, "say so: qshard.quantize_"),
        ((2, 64, 48), 1, 0, False, "say so: qshard.quantize_"),
        ((2, 64, 48), 1, 1, False, "say so: qshard.quantize_"),
    )
    for shape, dim, fsdp_dim, is_named, message in cases:
        model = nn.Module()
        part = distribute_tensor(torch.randn(shape, device=device()), mesh["tp"], [Shard(dim)])
        model.weight = nn.Parameter(part)
        quantize(model, "float8_blockwise", **({"tp_mesh": mesh["tp"]} if is_named else {}))
        with pytest.raises(NotImplementedError, match=message):
            shard(model, mesh["dp"], fsdp_dim)


@on_ranks(4)
def test_the_report_names_blocks_that_tensor_parallelism_cuts():
    mesh = full_mesh(2, 2, names=("dp", "tp"))
    for tp_dim, fsdp_dim, said in ((1, 0, "rows in parts of 88, blocks of 128"), (2, 1, "columns in parts of 32, blocks of 128")):
        model = nn.Module()
        part = distribute_tensor(torch.randn(2, 176, 64, device=device()), mesh["tp"], [Shard(tp_dim)])
        model.weight = nn.Parameter(part)
        quantize(model, "float8_blockwise", tp_mesh=mesh["tp"])
        shard(model, mesh["dp"], fsdp_dim)
        (row,) = qshard.report(model)
        assert row.cut_blocks == said
    assert {row.cut_blocks for row in qshard.report(experts(mesh=mesh["dp"]))} == {""}


@on_ranks(2)
def test_rows_of_another_generation_keep_their_codes():
    """A copy of all rows of a shard takes codes and scales, as one out of a stack that was flushed once more does."""
    mesh, rank = full_mesh(2), dist.get_rank()
    for format, keep_master in itertools.product(FITTING, (True, False)):
        model, whole = experts(format, mesh, keep_master=keep_master), experts(format, keep_master=keep_master)
        with torch.no_grad():
            whole.up.mul_(3)
            qshard.flush(whole)
            mine = whole.up.detach()[:, 88 * rank : 88 * rank + 88]
            local(model.up).copy_(mine)
        part = local(model.up).detach()
        assert torch.equal(ops.codes(part).view(torch.uint8), ops.codes(mine).view(torch.uint8)), format
        assert torch.equal(ops.dequantize(part), ops.dequantize(mine)), format


# ------------------------------------------------------------------------------- parts of experts

CUT = (2, 256, 512)  # cuts lie between blocks


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CUT, generator=torch.Generator().manual_seed(1)).to(device()))


def run_parts(format, dim, fsdp_dim, options):
    """Codes and scales of each rank's part are those of the whole stack's, cut as it is."""
    rows = 2 if fsdp_dim is not None else 1
    mesh = full_mesh(rows, dist.get_world_size() // rows, names=("dp", "tp"))
    model, whole = Stack(), Stack()
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(dim)]))
    for each, place in ((model, {"tp_mesh": mesh["tp"]}), (whole, {})):
        torch.manual_seed(0)
        quantize(each, format, **options, **place)
    if fsdp_dim is not None:
        shard(model, mesh["dp"], fsdp_dim)
    wrong = {}
    for action in ("made", "step", "step"):
        for each in (model, whole):
            if action == "step":
                grad = torch.randn(CUT, generator=torch.Generator().manual_seed(2)).to(device())
                give_gradient(each.weight, grad)
                torch.optim.SGD(each.parameters(), lr=0.5, foreach=False).step()
        with unsharded(model) if fsdp_dim is not None else contextlib.nullcontext():
            part = local(model.weight).detach()
            want = ops.dequantize(whole.weight.detach()).chunk(mesh["tp"].size(), dim)[mesh["tp"].get_local_rank()]
            codes = ops.codes(whole.weight.detach()).chunk(mesh["tp"].size(), dim)[mesh["tp"].get_local_rank()]
            wrong[action] = int((ops.dequantize(part) != want).sum()), int((ops.codes(part) != codes).sum())
    return {action: count for action, count in wrong.items() if count != (0, 0)}


@pytest.mark.parametrize("format", FORMATS)
@on_worlds(2)
def test_parts_of_experts_have_the_codes_of_the_whole(world, format):
    for dim, stochastic in itertools.product((1, 2), (False, True)):
        options = {"keep_master": not stochastic, "stochastic_rounding": stochastic}
        assert world.run(run_parts, format, dim, None, options) == [{}] * world.size, (dim, stochastic)


@pytest.mark.parametrize("format", FORMATS)
@on_worlds(4)
def test_parts_of_experts_under_fsdp2(world, format):
    fsdp_dims = (0, 1) if format in FITTING else (0,)
    for dim, fsdp_dim in itertools.product((1, 2), fsdp_dims):
        assert world.run(run_parts, format, dim, fsdp_dim, {}) == [{}] * world.size, (dim, fsdp_dim)
