"""Tokens that travel in codes to the experts of other ranks, beside one process that has all tokens and experts."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from collective_calls import ExchangedRows
from dist_helpers import device, full_mesh, gather_objects, on_ranks
from helpers import ops
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import qshard
from qshard.experts import exchange

IN_CODES = [f for f in ops.formats() if exchange.row_format(f)]
EXPERTS, K, HIDDEN, SLOTS = 8, 160, 96, 3  # mxfp8_1x32 takes multiples of 32


def tokens(rank, rows=None, dtype=torch.float32):
    """(x, ids, scores) of a rank. Rank 1 has none, and experts 2 and 5 get none."""
    generator = torch.Generator().manual_seed(rank)
    rows = (0 if rank == 1 else 11 + 6 * rank) if rows is None else rows
    x = torch.randn(rows, K, generator=generator) * 2.0 ** torch.randint(-9, 9, (rows, 1), generator=generator)
    x[:1] = 0
    scores = torch.rand(rows, EXPERTS, generator=generator)
    scores[:, [2, 5]] = 0
    scores, ids = scores.topk(SLOTS)
    return x.to(device(), dtype).requires_grad_(), ids.to(device()), scores.to(device()).requires_grad_()


def experts_of(format, rank=0, ranks=1, dtype=torch.float32):
    """Those of one rank."""
    module = qshard.nn.GroupedExperts(K, HIDDEN, EXPERTS // ranks, dtype=dtype)
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for stack in module.parameters():
            values = torch.randn(EXPERTS, *stack.shape[1:], generator=generator) / 8
            stack.copy_(values.chunk(ranks)[rank])
    if format:
        qshard.quantize_(module, format)
    return module.to(device())


class Arrived(torch.autograd.Function):
    """Rows, or the gradient of rows, in codes."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.format = backward
        return ops.quantize(x, forward) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ops.quantize(grad, ctx.format) if ctx.format else grad, None, None


class InSlots(torch.autograd.Function):
    """A row of x for each slot of ids, whose gradients are added up over the experts of each rank, and then over
    ranks: in float32 in the order of experts, each sum rounded."""

    @staticmethod
    def forward(ctx, x, ids, ranks):
        ctx.save_for_backward(ids)
        ctx.ranks = ranks
        return x.unsqueeze(1).expand(-1, ids.shape[1], -1).flatten(0, 1)

    @staticmethod
    def backward(ctx, grad):
        (ids,) = ctx.saved_tensors
        grad, (ids, order) = grad.unflatten(0, ids.shape), ids.sort(dim=1, stable=True)
        total = torch.zeros(grad.shape[::2], device=grad.device)
        for rank in range(ctx.ranks):
            part = torch.zeros_like(total)
            for slot in range(ids.shape[1]):
                is_here = (ids[:, slot] // (EXPERTS // ctx.ranks) == rank)[:, None]
                part += torch.where(is_here, grad[torch.arange(len(grad)), order[:, slot]].float(), 0)
            total += part.to(grad.dtype).float()
        return total.to(grad.dtype), None, None


def in_one_process(format, modules, x, ids, scores):
    """What one process makes of all ranks' tokens, with the experts in as many modules."""
    ranks, travels = len(modules), exchange.row_format(format)
    rows = InSlots.apply(x, ids, ranks)
    ids, order = ids.flatten().sort(stable=True)
    rows = rows[order]
    counts = torch.stack([(ids == e).sum() for e in range(EXPERTS)]).view(ranks, -1)
    y = []
    for module, given, count in zip(modules, rows.split(counts.sum(1).tolist()), counts):
        y.append(Arrived.apply(module(Arrived.apply(given, travels, None), count), None, travels))
    y = torch.cat(y)
    y = y[torch.argsort(order)].unflatten(0, (-1, SLOTS))
    return (y * scores.unsqueeze(-1)).sum(1).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", [*IN_CODES, "float8_delayed", None], ids=str)
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.pairwise
@on_ranks(2, 4)
def test_experts_on_other_ranks_compute_what_one_process_does(format, dtype, checkpoints):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = [tokens(r, dtype=dtype) for r in range(ranks)]
    modules = [experts_of(format, r, ranks, dtype) for r in range(ranks)]
    all_x, all_ids, all_scores = (torch.cat(tensors).detach() for tensors in zip(*parts))
    all_x.requires_grad_(), all_scores.requires_grad_()
    module, (x, ids, scores) = experts_of(format, rank, ranks, dtype), parts[rank]
    dispatcher = qshard.TokenDispatcher(EXPERTS)

    def moe(x, scores):
        rows, counts, routes = dispatcher.dispatch(x, ids, format)
        assert rows.shape == (counts.sum(), K) and rows.dtype == x.dtype
        return dispatcher.combine(module(rows, counts), routes, scores)

    weights = torch.randn(all_x.shape, generator=torch.Generator().manual_seed(7)).to(device())
    begin = sum(len(part[0]) for part in parts[:rank])
    mine = slice(begin, begin + len(x))
    for _ in range(2):  # accumulates
        expected = in_one_process(format, modules, all_x, all_ids, all_scores)
        (expected * weights).sum().backward()
        out = checkpoint(moe, x, scores, use_reentrant=False) if checkpoints else moe(x, scores)
        (out * weights[mine]).sum().backward()
    assert torch.equal(out, expected[mine])
    with torch.no_grad():
        assert torch.equal(moe(x, scores), out)
    assert torch.equal(scores.grad, all_scores.grad[mine])
    assert torch.equal(x.grad, all_x.grad[mine])
    for got, other in zip(module.parameters(), modules[rank].parameters()):
        assert torch.equal(got.grad, other.grad)
    assert qshard.is_quantized(module.w1) == (format is not None)


class Layer(nn.Module):
    """A mixture of experts on a mesh (efsdp, ep)."""

    def __init__(self, mesh, recipe, sends_codes):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(K, EXPERTS, bias=False)
        self.dispatcher, self.sends_codes = qshard.TokenDispatcher(EXPERTS, mesh["ep"]), sends_codes
        self.experts = experts_of(None)
        self.to(device())
        for name, stack in self.experts.named_parameters():
            part = distribute_tensor(stack.detach(), mesh["ep"], [Shard(0)])
            self.experts.register_parameter(name, nn.Parameter(part))
        qshard.quantize_(self.experts, recipe, tp_mesh=mesh["ep"])
        fully_shard(self.experts, mesh=mesh["efsdp"])
        fully_shard(self, mesh=mesh._flatten("all"))

    def forward(self, x):
        scores, ids = self.router(x).softmax(-1).topk(SLOTS)
        format = self.experts.weight_format if self.sends_codes else None
        rows, counts, routes = self.dispatcher.dispatch(x, ids, format)
        return x + self.dispatcher.combine(self.experts(rows, counts), routes, scores)


@pytest.mark.parametrize(
    "recipe", [qshard.MXFP8BlockScaling, qshard.Float8BlockScaling, qshard.Float8RowwiseScaling]
)
@on_ranks(4)
def test_sharded_experts_train_beside_those_that_get_values(recipe):
    """Experts that quantize what they get have the same codes, but for columns, which are made of those that came."""
    mesh, losses = full_mesh(2, 2, names=("efsdp", "ep")), []
    x = torch.randn(20 + dist.get_rank(), K, generator=torch.Generator().manual_seed(dist.get_rank())).to(device())
    for sends_codes in (False, True):
        model = Layer(mesh, recipe(emulate=True), sends_codes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        assert all(map(qshard.is_quantized, model.experts.parameters()))
    values, codes = map(torch.tensor, losses)
    assert values[0] == codes[0] and codes[-1] < codes[0]
    torch.testing.assert_close(codes, values, rtol=1e-3, atol=0)


@pytest.mark.parametrize("format", IN_CODES)
@on_ranks(2)
def test_codes_take_half_of_the_bytes(format):
    """Those that the report says."""
    rank, columns = dist.get_rank(), 1024
    x = torch.randn(40 + rank, columns, dtype=torch.bfloat16, device=device(), requires_grad=True)
    ids = torch.randint(0, EXPERTS, (len(x), SLOTS), device=device())
    dispatcher = qshard.TokenDispatcher(EXPERTS)
    with ExchangedRows() as sent:
        rows, _, routes = dispatcher.dispatch(x, ids, format)
        y, of_results = rows * 2, []
        y.register_hook(lambda grad: of_results.append(ops.format(grad)))
        dispatcher.combine(y, routes).sum().backward()
    assert [ops.format(rows)] == of_results == [exchange.row_format(format)]
    values = torch.bfloat16
    assert sent.dtypes() == [torch.int64, exchange.PLACE, torch.uint8, values, torch.uint8, values]
    (tokens_sent, row), of_gradients = sent.in_codes()
    assert of_gradients == (SLOTS * len(x), row) and row <= 0.53 * columns * 2
    is_other = ids // (EXPERTS // 2) != rank
    forth, back = routes.exchange.leaving()
    assert 0 < forth == int(is_other.sum())
    # A token travels once to a rank, and the sum of its gradients once back.
    tokens = int(is_other.any(1).sum())
    assert tokens_sent == tokens + int((~is_other).any(1).sum()) < SLOTS * len(x)
    of_other = gather_objects(tokens)[1 - rank]
    expected = (tokens + forth) * row + (back + of_other) * columns * 2 + forth * exchange.PLACE.itemsize
    assert qshard.report(dispatcher).sent().tokens == expected
    assert f"tokens {expected:,} B" in str(qshard.report(nn.Sequential(dispatcher)))


@on_ranks(2, 4)
def test_ranks_may_choose_other_numbers_of_experts():
    """The experts add nothing: a token comes back as often as it has experts, of which two may be one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dispatcher, generator = qshard.TokenDispatcher(EXPERTS), torch.Generator().manual_seed(rank)
    for slots, rows in (((1, 5, 2, 3), (4, 3, 2, 5)), ((1, 3, 3, 3), (0, 6, 0, 1)), ((12,) * 4, (9,) * 4)):
        x = torch.randn(rows[rank], K, generator=generator).to(device()).requires_grad_()
        ids = torch.randint(0, EXPERTS, (rows[rank], slots[rank]), generator=generator).to(device())
        dispatched, counts, routes = dispatcher.dispatch(x, ids)
        y = dispatcher.combine(dispatched, routes)
        y.sum().backward()
        assert counts.sum() == len(dispatched)
        torch.testing.assert_close(y, x * slots[rank])
        assert torch.equal(x.grad, torch.full_like(x, slots[rank]))


@on_ranks(2)
def test_parts_of_a_sum_that_float16_cannot_hold():
    dispatcher = qshard.TokenDispatcher(EXPERTS)
    x = torch.zeros(1, K, dtype=torch.float16, device=device(), requires_grad=True)
    ids = torch.tensor([[0, 1, 4, 5]], device=device())
    rows, _, routes = dispatcher.dispatch(x, ids)
    gradients = torch.tensor([[4e4, 4e4, -4e4, -4e4]], dtype=torch.float16, device=device())
    with ExchangedRows() as sent:
        dispatcher.combine(rows, routes, gradients).sum().backward()
    assert not x.grad.any() and sent.dtypes() == [torch.float16, torch.float16, torch.float32]
    # Each rank has one token, which it also sends to the other rank, where two of its four experts are.
    forth, back = routes.exchange.leaving()
    expected = (1 + forth) * K * 2 + back * K * 2 + K * 4 + forth * exchange.PLACE.itemsize
    assert (forth, back) == (2, 2) and qshard.report(dispatcher).sent().tokens == expected


@on_ranks(2)
def test_a_format_without_scales_in_rows_sends_values_and_says_so_once():
    x, ids, _ = tokens(dist.get_rank())
    dispatcher = qshard.TokenDispatcher(EXPERTS)
    exchange._warn_of_values.cache_clear()
    with warnings.catch_warnings(record=True) as caught, ExchangedRows() as sent:
        warnings.simplefilter("always")
        for _ in range(2):
            dispatcher.dispatch(x, ids, "float8_delayed")
        dispatcher.dispatch(x, ids)
    assert [str(w.message).split(":")[:2] for w in caught if "tokens" in str(w.message)] == [
        ["qshard.TokenDispatcher", " float8_delayed has no format of rows in codes, so tokens are sent as values; "
         "mxfp8, float8_blockwise, float8_rowwise and float8_tensorwise have one"]
    ]
    assert not sent.in_codes()


@on_ranks(2)
def test_whatever_is_wrong_is_an_error_on_all_ranks_before_tokens_are_sent():
    rank, mesh = dist.get_rank(), full_mesh()
    dispatcher = qshard.TokenDispatcher(EXPERTS, mesh)
    x, ids, scores = tokens(0)
    bad_ids = ids.clone()
    bad_ids[3, 1] = EXPERTS
    negative = ids.clone()
    negative[[3, 5], 1] = -1
    cases = [
        ((x, bad_ids), (x, ids), "rank 0 of the group has 1 ids outside of [0, 8)"),
        ((x, negative), (x, ids), "rank 0 of the group has 2 ids outside of [0, 8)"),
        ((x[:, :96], ids), (x, ids), "other columns, dtype or format"),
        ((x.bfloat16(), ids), (x, ids), "other columns, dtype or format"),
        ((x, ids, "mxfp8"), (x, ids), "other columns, dtype or format"),
        ((x, ids.float()), (x, ids), "integers|rank 0 of the group raised"),
        ((x, ids[1:]), (x, ids), "integers|rank 0 of the group raised"),
        ((x, DTensor.from_local(ids, mesh)), (x, ids), "give it to_local|rank 0 of the group raised"),
        ((x[0], ids), (x, ids), "needs tokens|rank 0 of the group raised"),
        ((x, ids, "float7"), (x, ids), "float7|rank 0 of the group raised"),
    ]
    for *arguments, text in cases:
        with ExchangedRows() as sent, pytest.raises((TypeError, ValueError)) as error:
            dispatcher.dispatch(*arguments[rank])
        assert any(part in str(error.value) for part in text.split("|")) and "\n" not in str(error.value)
        assert sent.dtypes() == [torch.int64]
    with pytest.raises(ValueError, match="2 ranks cannot have as many of 7 experts"):
        qshard.TokenDispatcher(7)
    rows, counts, routes = dispatcher.dispatch(x, ids)
    with pytest.raises(ValueError, match="rows that dispatch gave"):
        dispatcher.combine(rows[1:], routes)
    with pytest.raises(ValueError, match="as the ids were"):
        dispatcher.combine(rows, routes, scores[:, 1:])


@on_ranks(2)
def test_odd_tokens_arrive_as_they_are_quantized():
    """NaN, infinity, zero and subnormal values, rows that are not contiguous, and no tokens on any rank."""
    dispatcher = qshard.TokenDispatcher(2)
    x = torch.randn(K, 24, generator=torch.Generator().manual_seed(1)).T
    x[0], x[1, 3], x[2, 5], x[3, :40], x[4] = 0, torch.nan, torch.inf, 1e-40, torch.arange(K) * 1e-42
    x = x.to(device())
    ids = torch.full((len(x), 1), 1 - dist.get_rank(), device=device())
    for format in IN_CODES:
        rows, counts, _ = dispatcher.dispatch(x, ids, format)
        assert counts.tolist() == [len(x)]
        assert ops.format(rows) == exchange.row_format(format)
        assert torch.equal(ops.row_image(rows), ops.row_image(ops.quantize(x, exchange.row_format(format))))
        rows, counts, routes = dispatcher.dispatch(x[:0], ids[:0], format)
        assert rows.shape == (0, K) and counts.tolist() == [0]
        assert dispatcher.combine(rows * 1, routes).shape == (0, K)


@on_ranks(2)
def test_compiled_code_runs_around_it():
    """With a graph before it, one for the experts, and one after it."""
    module, dispatcher = experts_of("mxfp8"), qshard.TokenDispatcher(2 * EXPERTS)
    x, ids, scores = tokens(0)

    def moe(x, scores):
        rows, counts, routes = dispatcher.dispatch(x * 2, ids, module.weight_format)
        return dispatcher.combine(module(rows, counts), routes, scores) + x

    results = []
    for function in (moe, torch.compile(moe, backend="aot_eager")):
        y = function(x, scores)
        y.square().sum().backward()
        results.append((y, x.grad, scores.grad, module.w1.grad))
        x.grad = scores.grad = module.w1.grad = None
    assert all(map(torch.equal, *results))


@on_ranks(2)
def test_a_model_with_a_dispatcher_is_copied_and_pickled():
    dispatcher = copy.deepcopy(qshard.TokenDispatcher(EXPERTS))
    dispatcher = pickle.loads(pickle.dumps(dispatcher))
    x, ids, _ = tokens(dist.get_rank())
    rows, counts, routes = dispatcher.dispatch(x, ids)
    assert torch.equal(dispatcher.combine(rows, routes), x * SLOTS)


@on_ranks(2)
def test_ids_of_any_integers_and_errors_of_one_rank():
    """No dtype of ids wraps around, and what one rank is given wrongly is an error of all, which the next call survives."""
    x, ids = torch.randn(4, K, device=device()), torch.tensor([[0, 1], [2, 3], [3, 7], [7, 6]], device=device())
    for experts, dtype in ((256, torch.uint8), (300, torch.int8), (128, torch.int16)):
        dispatcher = qshard.TokenDispatcher(experts)
        (_, want, _), (_, got, _) = dispatcher.dispatch(x, ids), dispatcher.dispatch(x, ids.to(dtype))
        assert torch.equal(got, want), dtype
    dispatcher = qshard.TokenDispatcher(EXPERTS)
    for bad in (ids[:, :0], ids[:3], ids.float(), None):
        with pytest.raises((ValueError, TypeError, AttributeError)):
            dispatcher.dispatch(x, bad if dist.get_rank() == 1 else ids)
        dispatcher.dispatch(x, ids)
