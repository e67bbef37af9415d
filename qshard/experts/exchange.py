"""Rows on their way to the ranks that hold experts, and back; whole tokens: tokens_by_rank.py.

What an expert multiplies is quantized before it is sent, as it would be after it: rows in the forward of
`to_experts`, gradients in the backward of `from_experts`. A row's scales lie in it, so its codes are the same wherever
they are made, and what arrives is a quantized tensor. Sums come back as values: the forward of `from_experts`, and the
backward of `to_experts`.
"""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import distributed_c10d

from qshard._runtime.hooks import holds_codes
from qshard.formats import info_of

ops = torch.ops.qshard
PLACE = torch.int32  # the dtype of the numbers by which a rank tells another which of its rows an expert takes


@dataclass(frozen=True)
class Exchange:
    """How many rows this rank sends to each rank and gets of it, and how those that arrive lie expert by expert."""

    group: str  # its name
    sent: list[int]  # rows to each rank, in the order of ranks
    received: list[int]
    # The arriving rows by expert, and those of one by rank, and the inverse; without, they stay as they arrive.
    order: Tensor | None = None
    places: Tensor | None = None
    counts: Tensor | None = None  # (experts of this rank,): the rows of each
    from_ranks: Tensor | None = None  # (ranks,): received, on the device

    def forth(self, rows: Tensor) -> Tensor:
        """The rows of this rank's experts, of all ranks' (rows, ...)."""
        received = _all_to_all(rows, self.received, self.sent, self.group)
        return received if self.order is None else received[self.order]

    def back(self, rows: Tensor) -> Tensor:
        """The reverse. The first operator that reads the result waits for it, so others may run before."""
        rows = rows if self.places is None else rows[self.places]
        return _all_to_all(rows, self.sent, self.received, self.group)

    def leaving(self) -> tuple[int, int]:
        """Rows that leave this rank forth, and back."""
        rank = dist.get_rank(_group_of(self.group))
        return sum(self.sent) - self.sent[rank], sum(self.received) - self.received[rank]


def _all_to_all(rows, received, sent, group):
    """By the operator whose results torchtitan's selective checkpointing saves."""
    return funcol.all_to_all_single(rows.contiguous(), received, sent, _group_of(group))


def _group_of(name):
    return distributed_c10d._resolve_process_group(name)


def ranks_of(group: str) -> int:
    """The number of ranks of a group by its name."""
    return _group_of(group).size()


def group_name(group: dist.ProcessGroup | dist.DeviceMesh | None) -> str:
    """The name of a process group, of the group of a mesh of one dimension, or of that of all ranks."""
    if isinstance(group, dist.DeviceMesh):
        group = group.get_group()
    if group is None:
        if not dist.is_initialized():
            raise ValueError("qshard: there is no process group; call torch.distributed.init_process_group first")
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"qshard: {group!r} is no process group that this rank is in; give it to the ranks of a group")
    return group.group_name


def check_experts(name: str, experts: int, group: str) -> None:
    """Raises ValueError if the ranks of a group cannot have as many experts each."""
    ranks = _group_of(group).size()
    if experts < ranks or experts % ranks:
        raise ValueError(
            f"{name}: {ranks} ranks cannot have as many of {experts} experts each; use a multiple of {ranks}"
        )


@dataclass(frozen=True)
class Numbers:
    """What a rank counts before it sends rows."""

    rows: Tensor  # int64 (experts + 1,): those for each expert of all ranks, and at last for none
    facts: tuple  # have to be the same on all ranks
    tokens: Tensor | None = None  # int64 (ranks,): those for each rank, where several experts take one


def agree(
    name: str, experts: int, group: str, device: torch.device, prepare: Callable
) -> tuple[Exchange, Exchange, object]:
    """The one exchange of numbers before rows are sent: how many each expert gets of each rank. The host waits for it.

    prepare(): (Numbers, anything). Returns the exchange of rows; that of Numbers.tokens, whose rows stay in the order in
    which they arrive; and anything. Raises on all ranks, of `name`: what prepare() raised on one, and ValueError if a
    rank has rows for no expert or other facts."""
    ranks, rank = _group_of(group).size(), dist.get_rank(_group_of(group))
    error, prepared = None, None
    try:
        numbers, prepared = prepare()
    except Exception as raised:  # any error is told, since other ranks wait
        error, numbers = raised, Numbers(torch.zeros(experts + 1, dtype=torch.int64, device=device), ())
    local = experts // ranks
    sent = numbers.rows.new_zeros(ranks, local + 3)
    sent[:, :local] = numbers.rows[:experts].view(ranks, local)
    sent[:, local] = numbers.rows[experts]
    sent[:, local + 1] = -1 if error is not None else _digest(numbers.facts)
    if numbers.tokens is not None:
        sent[:, local + 2] = numbers.tokens
    # Waited for by name: each operator on views of a result that waits when it is read would run through Python.
    received = funcol.wait_tensor(_all_to_all(sent, None, None, group))
    counts, told = received.split((local, 3), 1)
    from_ranks, tokens = counts.sum(1), told[:, 2].contiguous()
    known = torch.stack([sent[:, :local].sum(1), from_ranks, sent[:, local + 2], tokens, *told[:, :2].T])
    # A copy, because torchtitan's selective checkpointing saves copies to the host: no second one is waited for.
    *rows, lost, digests = known.to("cpu").tolist()
    if error is not None:
        raise error
    _check(name, experts, rank, lost, digests, numbers.facts)
    order, places = _by_expert(counts, sum(rows[1]))
    found = Exchange(group, rows[0], rows[1], order, places, counts.sum(0), from_ranks)
    return found, Exchange(group, rows[2], rows[3], from_ranks=tokens), prepared


def _digest(facts):
    """A number that is not negative, and the same in every process."""
    return int.from_bytes(repr(facts).encode(), "little") % (2**61 - 1)


def _check(name, experts, rank, lost, digests, facts):
    refused = [r for r, digest in enumerate(digests) if digest == -1]
    other = [r for r, digest in enumerate(digests) if digest != digests[rank]]
    if refused:
        raise ValueError(f"{name}: rank {refused[0]} of the group raised an error; see what it says of its tokens")
    if other:
        raise ValueError(
            f"{name}: rank {other[0]} of the group has tokens of other columns, dtype or format than rank {rank}, "
            f"which has {', '.join(map(str, facts))}; give all ranks the same"
        )
    for r, count in enumerate(lost):
        if count:
            raise ValueError(
                f"{name}: rank {r} of the group has {count} ids outside of [0, {experts}); name an expert by each"
            )


def starts_of(counts: Tensor) -> Tensor:
    """Where each of the parts begins that lie one after the other and have these sizes."""
    return counts.cumsum(0) - counts


def _by_expert(counts, rows):
    """counts: (ranks, experts). The order of rows that lie rank by rank, and within them expert by expert, and its
    inverse. The host knows how many they are, so it need not wait. Rows of one rank and expert stay together, so no
    sort is needed: each moves as far as the first of them."""
    by_rank, by_expert = counts.reshape(-1), counts.T.reshape(-1)
    moves = starts_of(by_expert).view_as(counts.T).T - starts_of(by_rank).view_as(counts)
    numbers = torch.arange(rows, device=counts.device)
    order = numbers - moves.T.reshape(-1).repeat_interleave(by_expert, output_size=rows)
    return order, numbers + moves.reshape(-1).repeat_interleave(by_rank, output_size=rows)


def row_format(format: str | None, name: str | None = None) -> str | None:
    """The format of rows that meet weights of a format, if each row has all of its scales; None: values are sent,
    which a warning of `name` says once of each format. format: None of plain weights."""
    if format is None:
        return None
    rows = info_of(format).activations.row_format
    if rows is None or info_of(rows).outer_scale is not None:
        if name is not None:
            _warn_of_values(name, format)
        return None
    return rows


@functools.cache
def _warn_of_values(name, format):
    warnings.warn(
        f"{name}: {format} has no format of rows in codes, so tokens are sent as values; mxfp8, float8_blockwise, "
        "float8_rowwise and float8_tensorwise have one",
        stacklevel=4,
    )


def sent_by(send: Callable[[Tensor], Tensor], rows: Tensor, format: str | None) -> Tensor:
    """What arrives of rows (R, K), quantized if `format` says so. send: takes what travels, in as many rows."""
    rows = values_of(rows)
    if format is None:
        return send(rows)
    received = send(ops.row_image(ops.quantize(rows, format)))
    return ops.from_row_image(received, format, columns=rows.shape[1], dtype=rows.dtype)


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, exchange, format):
        ctx.exchange = exchange
        return sent_by(exchange.forth, x, format)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.exchange.back(values_of(grad)), None, None


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, exchange, format):
        # What a leaf has as its .grad is to be plain: it may be added to.
        ctx.exchange, ctx.format, ctx.is_leaf = exchange, format, y.is_leaf
        return exchange.back(values_of(y))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad = sent_by(ctx.exchange.forth, grad, ctx.format)
        return values_of(grad) if ctx.is_leaf else grad, None, None


def dtype_of_sums(dtype: torch.dtype) -> torch.dtype:
    """In which sums of gradients travel. A part of a sum may be out of float16's range where the sum is not."""
    return torch.float32 if dtype == torch.float16 else dtype


def values_of(x: Tensor) -> Tensor:
    """Quantized rows as values; any other tensor itself."""
    return ops.dequantize(x, dtype=x.dtype) if holds_codes(x) else x


def to_experts(x: Tensor, exchange: Exchange, format: str | None) -> Tensor:
    """Rows (R, K) of this rank's experts, expert by expert, in the dtype of x; quantized, where `format` has rows.

    x: (rows, K), in the order in which they are sent."""
    return _ToExperts.apply(x, exchange, format)


def from_experts(y: Tensor, exchange: Exchange, format: str | None) -> Tensor:
    """The rows that this rank sent, in the order in which it did, as its experts and those of other ranks made them of
    y (R, K). The gradient that y gets is quantized, where `format` has rows."""
    return _FromExperts.apply(y, exchange, format)


def bytes_sent(exchange: Exchange, rows: Tensor, tokens: Exchange | None = None) -> int:
    """What a forward and backward of `rows`, as the experts of this rank got them, send to other ranks, for
    `qshard.report`. tokens: the exchange of tokens, if these were sent once to each rank, with a place for each row."""
    forth, back = exchange.leaving()
    values = rows.shape[1] * rows.element_size()
    row = ops.row_image(rows).shape[1] if holds_codes(rows) else values
    if tokens is None:
        return 2 * (forth * row + back * values)
    tokens_forth, tokens_back = tokens.leaving()
    sums = rows.shape[1] * dtype_of_sums(rows.dtype).itemsize
    return (tokens_forth + forth) * row + back * values + tokens_back * sums + forth * PLACE.itemsize
