"""Experts on a mesh (efsdp, ep): Shard(0) over ep, and fully_shard on efsdp cuts what that leaves, so that
a weight is placed as (_StridedShard(0), Shard(0)).

Matrices of a stack have scales of their own, on whichever rank they lie. If experts lie below each other
in one matrix, scale blocks begin in each rank's part, and the one scale is the full tensor's, or the
part's if its rank quantized it by itself.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dist_helpers import device, full_mesh, on_ranks, on_worlds
from helpers import fit, has_two_images, ops
from models.formats import DELAYED, FORMATS, RECIPES
from models.plain_twins import flush_step
from models.tensor_parallel import give_gradient, local_part
from models.weights import grid, image_bytes, local, mismatching_bytes, unsharded
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import qshard
from qshard._runtime.classes import TensorState
from qshard.formats import info_of
from qshard.model.quantize import quantize_like
from qshard.modules import parameter_swap

BUDGET_S = 60
COLS = 72  # no multiple of a block
ROWS = 40
NAMES = ("stacked", "joined")


def values(experts, rows, seed):
    """(experts, rows, COLS): magnitudes differ by expert, row and column."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(experts, rows, COLS, generator=generator)
    value *= 2.0 ** torch.randint(-3, 4, (1, rows, 1), generator=generator)
    value *= 2.0 ** torch.randint(-2, 3, (1, 1, COLS), generator=generator)
    value *= 4.0 ** (torch.arange(experts).roll(seed) - 3).view(-1, 1, 1)
    return value.to(device())


class Experts(nn.Module):
    """The same experts twice: a matrix each, and below each other in one."""

    def __init__(self, experts, rows):
        super().__init__()
        self.stacked = nn.Parameter(values(experts, rows, 0))
        self.joined = nn.Parameter(values(experts, rows, 1).flatten(0, 1))


def quantize(model, format, ep_mesh=None):
    """`ep_mesh`: said to be tensor parallel."""
    groups = [ep_mesh.get_group().group_name] if ep_mesh and ep_mesh.size() > 1 else ()
    for name in NAMES:
        param = getattr(model, name)
        with torch.no_grad():
            value = quantize_like(param.detach(), format, True, name, groups)
        parameter_swap.replace(param, value)
    if "delayed" in format:
        qshard.flush(model)  # as quantize_ does: the first scale is that of the first values


def quantize_locals(model, format):
    """Each rank what it has, as a tensor of its own."""
    for name in NAMES:
        param = getattr(model, name)
        param._local_tensor = ops.quantize(param._local_tensor.detach(), format, keep_master=True)


def build(mesh, experts, rows, format, order):
    """`order` of: d, experts are distributed over ep; q, quantized, or l, each rank's part for itself;
    s, an optimizer step that leaves values as they are; f, fully_shard on efsdp."""
    model = Experts(experts, rows)
    ep_mesh, is_sharded = mesh["ep"], False
    for action in order:
        if action == "d":
            for name in NAMES:
                part = distribute_tensor(getattr(model, name).detach(), ep_mesh, [Shard(0)])
                setattr(model, name, nn.Parameter(part))
        elif action == "q":
            quantize(model, format, None if is_sharded else ep_mesh)
        elif action == "l":
            quantize_locals(model, format)
        elif action == "s":
            for param in model.parameters():
                give_gradient(param, torch.zeros(param.shape, device=device()))
            torch.optim.SGD(model.parameters(), lr=0.5, foreach=False).step()
            model.zero_grad()
        else:
            fully_shard(model, mesh=mesh["efsdp"])
            is_sharded = True
    return model


class Definition:
    """What this rank has to see: the part that ep gives it of the full values, quantized."""

    def __init__(self, mesh, experts, rows, format, order):
        self.plain = Experts(experts, rows)
        self.ep = mesh["ep"]
        self.by_parts = "l" in order
        self.has_tensor_scale = info_of(format).has_tensor_scale
        parts = {name: self.part(name) for name in NAMES}
        self.rows = {name: part.shape[0] for name, part in parts.items()}
        self.quantized = {
            name: ops.quantize(self.with_largest(name), format, keep_master=True) for name in NAMES
        }
        if "s" in order:
            self.update(is_step=True)

    def part(self, name):
        full = getattr(self.plain, name).detach()
        return full.chunk(self.ep.size())[self.ep.get_local_rank()]

    def with_largest(self, name):
        """This rank's part of the weight with the largest value of all below it, in blocks of its own."""
        part = self.part(name)
        if name == "stacked" or self.by_parts or not self.has_tensor_scale:
            return part
        below = torch.zeros(16 + -part.shape[0] % 16, COLS, device=part.device)
        below[-1, 0] = getattr(self.plain, name).detach().abs().max()
        return torch.cat([part, below])

    def update(self, is_step):
        for name, quantized in self.quantized.items():
            quantized.copy_(self.with_largest(name))
        if is_step:
            flush_step(list(self.quantized.values()))
        else:
            ops.flush(list(self.quantized.values()))

    def mismatches(self, model):
        """Bytes of gathered images and grids that differ, by name."""
        wrong = {}
        with unsharded(model):
            for name, want in self.quantized.items():
                got = local(getattr(model, name)).detach()
                assert got.shape == self.part(name).shape
                wrong[name] = self.mismatching(got, want, self.rows[name])
        return {name: count for name, count in wrong.items() if count}

    @staticmethod
    def mismatching(got, want, rows):
        """Bytes in which a gathered tensor, with FSDP2's padding, and `rows` of `want` differ."""
        if want.dim() > 2:
            return mismatching_bytes(got, want)
        row_bytes = image_bytes(want).numel() // want.shape[0]
        image, wanted = (image_bytes(t).view(-1, row_bytes)[:rows] for t in (got, want))
        scales = [grid(t).contiguous().view(torch.uint8) for t in (got, want)]
        assert scales[0].shape == scales[1].shape
        return int((image != wanted).sum() + (scales[0] != scales[1]).sum())


def act(action, model, definition, step):
    """What makes the ranks agree, on values that each expert has others of."""
    if action == "gather":
        return
    if action == "flush":
        with torch.no_grad():
            for seed, name in enumerate(NAMES):
                plain = getattr(definition.plain, name)
                plain.copy_(values(*definition.plain.stacked.shape[:2], 10 * step + seed).view_as(plain))
                param = getattr(model, name)
                local(param).copy_(local_part(plain, param))
        qshard.flush(model)
        return definition.update(is_step=False)
    for seed, name in enumerate(NAMES):
        plain = getattr(definition.plain, name)
        shape = definition.plain.stacked.shape[:2]
        plain.grad = values(*shape, 10 * step + seed + 5).flip(0).reshape(plain.shape)
        give_gradient(getattr(model, name), plain.grad.clone())
    for parameters in (model.parameters(), definition.plain.parameters()):
        torch.optim.SGD(parameters, lr=0.5, foreach=False).step()
    definition.update(is_step=True)


def run_bits(shape, format, orders, cases, experts_of):
    mesh = full_mesh(*shape, names=("efsdp", "ep"))
    wrong = {}
    rows = fit(format, ROWS)
    for order, actions, experts in itertools.product(orders, cases, experts_of):
        model = build(mesh, experts, rows, format, order)
        definition = Definition(mesh, experts, rows, format, order)
        for step, action in enumerate(actions, 1):
            act(action, model, definition, step)
            if action == "gather":
                wrong[order, actions, experts, step] = definition.mismatches(model)
        wrong[order, actions, experts, "end"] = definition.mismatches(model)
    return {key: names for key, names in wrong.items() if names}


ORDERS = ("dqf", "dqsf", "dfq", "dlf", "dlsf")
# What is first has to know the group.
ACTIONS = tuple(itertools.permutations(("gather", "step", "flush")))


@pytest.mark.parametrize("format", FORMATS)
@on_worlds(4)
def test_gathered_bytes_of_experts_are_those_of_whole_tensors(world, format):
    results = world.run(run_bits, (2, 2), format, ORDERS, ACTIONS, (6, 2))
    assert results == [{}] * world.size


@pytest.mark.parametrize("format", FORMATS)
@on_worlds(2)
def test_gathered_bytes_of_two_ranks(world, format):
    for shape in ((1, 2), (2, 1)):
        results = world.run(run_bits, shape, format, ORDERS[1:], ACTIONS[::2], (3,))
        assert results == [{}] * world.size, shape


# --------------------------------------------------------- quantize_ of stacks, and what multiplies them

DIM, HIDDEN, TOKENS = 64, 96, 5


class MLPs(nn.Module):
    """An MLP for each expert, whose tokens are (experts, tokens, DIM) of the experts that are here."""

    def __init__(self, experts):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(experts, DIM, HIDDEN) / 8)
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, DIM) / 8)

    def forward(self, x):
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        return torch.einsum("eth,ehd->etd", F.gelu(torch.bmm(x, up)), down)


def build_mlps(experts, format, order="q", mesh=None, **options):
    model, ep_mesh = MLPs(experts).to(device()), mesh and mesh["ep"]
    for action in order:
        if action == "d":
            for name, param in list(model.named_parameters()):
                setattr(model, name, nn.Parameter(distribute_tensor(param.detach(), ep_mesh, [Shard(0)])))
        elif action == "q":
            qshard.quantize_(
                model, RECIPES[format], parameter_fn=lambda param, name: True, tp_mesh=ep_mesh, **options
            )
        else:
            fully_shard(model, mesh=mesh["efsdp"])
    return model


def tokens(experts, step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(experts, TOKENS, DIM, generator=generator).to(device())


def train_mlps(model, experts, mesh=None, efsdp=1):
    """Losses of this rank's experts by step, of each rank of efsdp, and the last gradients."""
    ranks = range(efsdp) if mesh is None else [mesh.get_local_rank("efsdp")]
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), []
    for step in range(3):
        optimizer.zero_grad()
        for rank in ranks:
            x = tokens(experts, step, rank)
            if mesh is not None:
                x = x.chunk(mesh["ep"].size())[mesh.get_local_rank("ep")]
            each = model(x).square().sum((1, 2))
            (each.sum() / len(ranks)).backward()
            losses.append(each.detach())
        grads = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return losses, grads


def run_training(shape, experts_of, orders):
    mesh = full_mesh(*shape, names=("efsdp", "ep"))
    efsdp, ep = shape
    for format, (order, experts) in zip(
        FORMATS, itertools.cycle(itertools.product(orders, experts_of))
    ):
        model, want = build_mlps(experts, format, order, mesh), build_mlps(experts, format)
        for param in model.parameters():
            assert qshard.is_quantized(param)
        losses, grads = train_mlps(model, experts, mesh)
        want_losses, want_grads = train_mlps(want, experts, efsdp=efsdp)
        mine = slice(mesh.get_local_rank("efsdp"), None, efsdp)
        for got, full in zip(losses, want_losses[mine]):
            part = full.chunk(ep)[mesh.get_local_rank("ep")]
            torch.testing.assert_close(got, part, rtol=1e-4, atol=1e-5)
        for param, got, full in zip(model.parameters(), grads, want_grads):
            torch.testing.assert_close(local(got), local_part(full, param), rtol=1e-3, atol=1e-4)


@on_ranks(4)
def test_stacks_train_as_on_one_device():
    run_training((2, 2), (4, 6), ("dqf", "dfq"))


@on_ranks(2)
def test_stacks_without_fsdp():
    run_training((1, 2), (4,), ("dq",))


@on_ranks(4)
def test_a_world_as_large_as_the_number_of_experts():
    """Each rank of FSDP2 has one whole matrix; of two, some have none."""
    run_training((4, 1), (4, 2), ("qf", "fq"))


def hand_out(model, mesh):
    """As torchtitan's ExpertParallel does."""
    for name, param in list(model.named_parameters()):
        model.register_parameter(name, nn.Parameter(distribute_tensor(param, mesh["ep"], [Shard(0)])))
    return model


@pytest.mark.each_value
@pytest.mark.parametrize("keep_master", (True, False), ids=("master", "no-master"))
@pytest.mark.parametrize("format", FORMATS)
@on_ranks(2)
def test_stacks_that_are_handed_out_after_quantize_keep_their_codes(format, keep_master):
    mesh = full_mesh(1, 2, names=("efsdp", "ep"))
    whole = build_mlps(4, format, keep_master=keep_master)
    model = hand_out(build_mlps(4, format, keep_master=keep_master), mesh)
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    for param, full in zip(model.parameters(), whole.parameters()):
        part = local(param).detach()
        assert qshard.is_quantized(part) and TensorState(part).keeps_master() == keep_master
        for plane in (ops.codes, ops.scale_inv, ops.dequantize):
            assert torch.equal(plane(part).float(), plane(full.detach()[mine]).float())
    fully_shard(model, mesh=mesh["efsdp"])
    losses, _ = train_mlps(model, 4, mesh)
    expected, _ = train_mlps(whole, 4)
    if keep_master:  # else each part rounds by noise of its own
        for loss, full in zip(losses, expected):
            torch.testing.assert_close(loss, full[mine], rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_stacks_are_handed_out_on_meta_and_by_the_first_rank():
    mesh = full_mesh(1, 2, names=("efsdp", "ep"))
    with torch.device("meta"):
        model = MLPs(4)
    qshard.quantize_(model, "float8_blockwise", parameter_fn=lambda *_: True)
    fully_shard(hand_out(model, mesh), mesh=mesh["efsdp"])
    model.to_empty(device=device())
    assert [local(p).shape[0] for p in model.parameters()] == [2, 2]
    assert all(map(qshard.is_quantized, model.parameters()))
    other = build_mlps(4, "float8_blockwise")
    with torch.no_grad():
        other.up.mul_(1 + dist.get_rank())  # rank 0 has the values that count
    qshard.flush(other)
    hand_out(other, mesh)
    values = build_mlps(4, "float8_blockwise").up.detach()
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    assert torch.equal(local(other.up).detach() + 0, values[mine] + 0)
    with pytest.raises(NotImplementedError, match="would make the up of this MLPs plain again"):
        later = build_mlps(4, "float8_blockwise")
        later.register_parameter("up", nn.Parameter(distribute_tensor(later.up, mesh["ep"], [Shard(1)])))


PRODUCTS = (
    torch.bmm,
    torch.matmul,
    lambda x, w: torch.einsum("etd,edh->eth", x, w),
    lambda x, w: torch.stack([a @ b for a, b in zip(x, w)]),
    lambda x, w: torch._grouped_mm(x, w),
)


@pytest.mark.each_value
@pytest.mark.parametrize("keep_master", (True, False), ids=("master", "no-master"))
@pytest.mark.parametrize("format", FORMATS)
def test_products_of_a_stack_are_of_its_codes(format, keep_master):
    model = build_mlps(4, format, keep_master=keep_master)
    shown = ops.dequantize(model.up.detach()).requires_grad_()
    # If there are two images, a transposed stack is multiplied by the one for transposed operands.
    has_two = has_two_images(format)
    for multiply in PRODUCTS[: 2 if has_two else None]:
        x = tokens(4, 0, 0).requires_grad_()
        grads = []
        for weight in (model.up, shown):
            output = multiply(x, weight)
            output.backward(torch.ones_like(output))
            grads.append([output.detach(), weight.grad])
            if not has_two:
                grads[-1].append(x.grad)
            x.grad = weight.grad = None
        assert all(map(torch.equal, *grads)), multiply


def test_stacks_in_modules():
    """State dicts, moves, the way back, and what cannot be chosen."""
    source = build_mlps(2, DELAYED)
    assert {"up", "up_amax_history", "down"} <= source.state_dict().keys()
    copy = build_mlps(2, DELAYED)
    with torch.no_grad():
        copy.up.mul_(3)
    for assign in (False, True):
        copy.load_state_dict(source.state_dict(), assign=assign)
        assert qshard.is_quantized(copy.up) and torch.equal(copy.up * 1, source.up * 1)
    plain = qshard.dequantize_(copy)
    assert not any(map(qshard.is_quantized, plain.parameters()))
    assert plain.state_dict().keys() == {"up", "down"}
    with torch.device("meta"):
        late = MLPs(2)
    qshard.quantize_(late, RECIPES[DELAYED], parameter_fn=lambda param, name: name == "up")
    late.to_empty(device=device()).to(torch.bfloat16)
    assert qshard.is_quantized(late.up) and not qshard.is_quantized(late.down)
    with pytest.raises(ValueError, match="parameter_fn chose 0.bias of shape"):
        norm = nn.Sequential(nn.LayerNorm(8))
        qshard.quantize_(norm, RECIPES[DELAYED], parameter_fn=lambda p, name: name == "0.bias")
    with pytest.raises(ValueError, match='weights="dynamic" is of linears'):
        qshard.quantize_(late, RECIPES[DELAYED], parameter_fn=lambda p, n: True, weights="dynamic")


def refusals():
    """What each rank says of experts that are fewer than the ranks of ep, and of ep unnamed."""
    mesh = full_mesh(2, 2, names=("efsdp", "ep"))
    errors = []
    for order in ("dq", "dfq"):
        with pytest.raises(NotImplementedError) as error:
            build(mesh, 1, ROWS, "float8_blockwise", order)
        errors.append(str(error.value))
    model = build(mesh, 1, ROWS, "float8_blockwise", "dlsf")  # a step before meets no other rank
    with pytest.raises(NotImplementedError) as error:
        qshard.flush(model)
    errors.append(str(error.value))
    model = build(mesh, 4, ROWS, "float8_blockwise", "d")
    quantize(model, "float8_blockwise")  # as rows that FSDP cut
    fully_shard(model, mesh=mesh["efsdp"])
    with pytest.raises(NotImplementedError) as error, unsharded(model):
        pass
    return [*errors, str(error.value)]


@on_ranks(4)
def test_refusals_have_names_on_all_ranks():
    *few, unnamed = refusals()
    for error in few:
        assert "over 2 ranks would leave some of them nothing of a weight of shape (1, 40, 72)" in error
    assert "it was quantized as rows of a tensor of" in unnamed
    assert "say so: qshard.quantize_(model, recipe, tp_mesh=tp_mesh)" in unnamed
