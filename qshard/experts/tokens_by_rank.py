"""Tokens on their way to experts: each is sent once to a rank, whichever of that rank's experts take it.

With 4 experts of a token on 2 ranks that is about half of the rows. A second message tells the experts' rank which of
the arrived tokens each of its rows is. In backward that rank adds up a token's gradients before it sends them, and the
token's rank adds up those sums.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qshard.experts.exchange import PLACE, Exchange, dtype_of_sums, sent_by, starts_of, values_of

ops = torch.ops.qshard


class Destinations:
    """The ranks that tokens go to. Rank i of `ranks` has experts [i * n, (i + 1) * n) of all.

    ids: (T, k), the experts of tokens. Ids of no expert count as some rank's here; `exchange.agree` refuses them."""

    def __init__(self, ids: Tensor, experts: int, ranks: int):
        self._ranks = (ids.long() // (experts // ranks)).clamp(0, ranks - 1)
        self._goes = torch.zeros(len(ids), ranks, dtype=torch.bool, device=ids.device).scatter_(1, self._ranks, True)
        self.counts = self._goes.sum(0)  # (ranks,): tokens for each rank
        # A rank sends rows rank by rank, and to one rank in the order of tokens: the row of token t for rank r is the
        # last of ends[r * T + t] rows.
        self._ends = self._goes.T.reshape(-1).cumsum(0)

    def tokens(self, rows: int) -> Tensor:
        """(rows,): the token of each row that this rank sends. The host knows how many these are."""
        return _where_true(self._ends, rows) % max(1, len(self._goes))

    def rows(self, rows: int) -> tuple[Tensor, Tensor]:
        """The rows that this rank sends, token by token, and (T,): how many are of each token and those before it."""
        tokens, ranks = self._goes.shape
        ends = self._goes.reshape(-1).cumsum(0)
        at = _where_true(ends, rows)  # t * ranks + r
        by_token = self._ends.view(ranks, tokens).T.reshape(-1)[at] - 1
        return by_token, ends.view(tokens, ranks)[:, -1]

    def places(self, order: Tensor) -> Tensor:
        """Which of the rows that go to its rank each slot of ids is. order: of the slots, (T * k,)."""
        rows = self._ends.view(len(self.counts), -1).T.gather(1, self._ranks) - 1
        return (rows - starts_of(self.counts)[self._ranks]).view(-1)[order].to(PLACE)


def _where_true(ends, count):
    """(count,): where a mask is true, of which `ends` counts those up to each place. The host knows the count, so that
    it need not wait."""
    return torch.searchsorted(ends, torch.arange(1, count + 1, device=ends.device))


@dataclass(frozen=True)
class TokensByRank:
    """Where tokens go, and which of the arrived tokens this rank's experts take."""

    exchange: Exchange  # sends tokens to ranks, and leaves them in the order in which they arrive
    to: Destinations
    index: Tensor  # (sent,): the token of each row that this rank sends
    taken: Tensor  # int32 (R,): the arrived token of each row of this rank's experts

    def forth(self, tokens: Tensor) -> Tensor:
        """Tokens (T, ...) of each rank to rows (R, ...) of each rank's experts, expert by expert."""
        return self.exchange.forth(tokens[self.index])[self.taken]

    def sums(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For the way back: rows of experts by arrived token, and the end of each token's; rows that this rank sent by
        token, and the end of each token's."""
        arrived = torch.arange(sum(self.exchange.received), dtype=PLACE, device=self.taken.device)
        by_token, rows = self.taken.sort(stable=True)
        ends = torch.searchsorted(by_token, arrived, right=True)
        return rows, ends, *self.to.rows(len(self.index))


def route(tokens: Exchange, rows: Exchange, to: Destinations, order: Tensor) -> TokensByRank:
    """Tells each rank which tokens its experts take. tokens, rows: as `exchange.agree` found them; order: of the slots
    of ids, by expert. The host does not wait."""
    starts = starts_of(tokens.from_ranks).to(PLACE)
    starts = starts.repeat_interleave(rows.from_ranks, output_size=sum(rows.received))
    # A place counts from the first token of the rank that tells it.
    taken = rows.forth(to.places(order)) + starts[rows.order]
    return TokensByRank(tokens, to, to.tokens(sum(tokens.sent)), taken)


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tokens, format, *sums):
        ctx.exchange = tokens.exchange
        ctx.save_for_backward(*sums)
        return sent_by(tokens.forth, x, format)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        rows, ends_of_arrived, sent, ends = ctx.saved_tensors
        grad = values_of(grad)
        sums = ops._sum_rows(grad.to(dtype_of_sums(grad.dtype)), rows, ends_of_arrived)
        sums = ops._sum_rows(ctx.exchange.back(sums), sent, ends)
        return sums.to(grad.dtype), None, None, None, None, None, None


def to_experts(x: Tensor, tokens: TokensByRank, format: str | None) -> Tensor:
    """Rows (R, K) of this rank's experts, expert by expert, in the dtype of x (T, K); quantized, where `format` has
    rows."""
    needs_sums = torch.is_grad_enabled() and x.requires_grad
    return _ToExperts.apply(x, tokens, format, *(tokens.sums() if needs_sums else (None,) * 4))
