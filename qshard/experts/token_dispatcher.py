"""TokenDispatcher: tokens to the ranks of their experts, and what these made of them back."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qshard import module_state
from qshard.experts import exchange, tokens_by_rank
from qshard.experts.exchange import Exchange, Numbers
from qshard.experts.tokens_by_rank import Destinations
from qshard.modules.outside_graphs import outside_graphs
from qshard.nn.parts.grouped import PickRows, inverse_of

_NAME = "qshard.TokenDispatcher"
_VALUES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Routes:
    """Which way tokens went, by which `combine` brings back what experts made of them."""

    exchange: Exchange
    format: str | None  # rows travel in it; None: values do
    order: Tensor  # (T * k,): the slot of each row, in the order in which they were sent
    places: Tensor  # (T * k,): the inverse
    slots: int  # k


class TokenDispatcher(nn.Module):
    """Sends the tokens of a mixture of experts to the ranks that hold their experts, in the codes that these multiply,
    and brings back the results. It has no parameters.

    >>> rows, counts, routes = dispatcher.dispatch(x, ids, experts.message_format)
    >>> y = dispatcher.combine(experts(rows, counts), routes, scores)

    A token is quantized once, and its codes are sent once to each rank that has experts of it. `rows` is a quantized
    tensor, which `grouped_linear`, `swiglu_experts` and linears multiply, and of which other operators read the values.
    Gradients of the experts' results are quantized, too, and sent to each expert. Results are sent as values, and so
    are gradients of tokens: each rank first adds up those of a token, in float32, and rounds the sum.

    num_experts: of all ranks. Each rank of `group` has as many, in the order of its ranks.
    group: a process group, or a DeviceMesh of one dimension; all ranks without. The ranks of it call both methods,
        also those that have no tokens.

    Raises ValueError if the ranks cannot share the experts evenly.
    """

    def __init__(self, num_experts: int, group: "dist.ProcessGroup | dist.DeviceMesh | None" = None):
        super().__init__()
        self.num_experts, self.group = num_experts, exchange.group_name(group)
        exchange.check_experts(_NAME, num_experts, self.group)

    @outside_graphs
    def dispatch(self, x: Tensor, ids: Tensor, format: str | None = None) -> tuple[Tensor, Tensor, Routes]:
        """x: (T, K), float32, bfloat16 or float16; ids: (T, k) integers, the experts of each token;
        another rank may have another k.

        format: of the weights that the rows meet, as `experts.message_format` or `qshard.ops.format(stack)` says it.
            None, of plain weights, sends values, and so does, with a warning, a format in which rows share scales.

        Returns (rows, counts, routes). rows: (R, K) in the dtype of x, those of this rank's first expert, then of its
        second: of each first those of the group's first rank. counts: int64 (experts of this rank,). routes: for
        `combine`.

        Collective. The host waits for the device once, to read how many rows the ranks send each other. Raises
        ValueError and TypeError on all ranks, before tokens are sent, for shapes and dtypes that do not fit, ids that
        are no expert's, and arguments that are not those of other ranks."""
        def prepare():
            _check_tokens(x, ids)
            counts, order = _sorted(ids, self.num_experts)
            rows_format = exchange.row_format(format, _NAME)
            to = Destinations(ids, self.num_experts, exchange.ranks_of(self.group))
            return Numbers(counts, (x.shape[1], x.dtype, rows_format), to.counts), (order, to, rows_format)

        found, tokens, prepared = exchange.agree(_NAME, self.num_experts, self.group, x.device, prepare)
        order, to, rows_format = prepared
        rows = tokens_by_rank.to_experts(x, tokens_by_rank.route(tokens, found, to, order), rows_format)
        module_state.of(self).tokens_sent = exchange.bytes_sent(found, rows, tokens)
        return rows, found.counts, Routes(found, rows_format, order, inverse_of(order), ids.shape[1])

    @outside_graphs
    def combine(self, rows: Tensor, routes: Routes, scores: Tensor | None = None) -> Tensor:
        """rows: (R, N), what the experts made of those that `dispatch` gave. scores: (T, k), what each result is
        multiplied by; ones without. Returns (T, N) in the dtype of rows, the sum for each token. Collective; the host
        does not wait.

        Raises ValueError for shapes that are not those of the routes."""
        received, tokens = sum(routes.exchange.received), len(routes.order) // routes.slots
        if rows.dim() != 2 or len(rows) != received:
            raise ValueError(f"{_NAME}.combine: needs the {received} rows that dispatch gave, got {tuple(rows.shape)}")
        if scores is not None and scores.shape != (tokens, routes.slots):
            raise ValueError(
                f"{_NAME}.combine: scores must be {(tokens, routes.slots)}, as the ids were, got {tuple(scores.shape)}"
            )
        y = exchange.from_experts(rows, routes.exchange, routes.format)
        y = PickRows.apply(y, routes.places, routes.order, 1).unflatten(0, (tokens, routes.slots))
        if scores is not None:
            y = y * scores.unsqueeze(-1)
        return y.sum(1).to(rows.dtype)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}"


def _check_tokens(x, ids):
    if isinstance(x, DTensor) or isinstance(ids, DTensor):
        raise TypeError(f"{_NAME}: needs this rank's own tokens and ids, got a DTensor; give it to_local() of both")
    if x.dim() != 2 or x.dtype not in _VALUES:
        raise ValueError(
            f"{_NAME}: needs tokens (T, K) of float32, bfloat16 or float16, got {x.dtype} of shape {tuple(x.shape)}"
        )
    is_integer = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if ids.dim() != 2 or not ids.shape[1] or len(ids) != len(x) or not is_integer or ids.device != x.device:
        raise ValueError(
            f"{_NAME}: needs ids of experts ({len(x)}, k), k > 0, as integers on {x.device}, got {ids.dtype} of shape "
            f"{tuple(ids.shape)} on {ids.device}"
        )


def _sorted(ids, experts):
    """How many slots of ids (T, k) have each expert, and at last none, and the slots in the order of their experts."""
    ids, order = torch.sort(ids.reshape(-1).long(), stable=True)  # uint8 cannot hold 256, the last edge of 256 experts
    edges = torch.arange(experts + 1, device=ids.device)
    counts = torch.searchsorted(ids, edges).diff()
    return torch.cat([counts, len(ids) - counts.sum(0, keepdim=True)]), order
