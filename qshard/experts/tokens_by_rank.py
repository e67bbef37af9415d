"""Tokens on their way to experts: each is sent once to a rank, whichever of that rank's experts take it.

With 4 experts of a token on 2 ranks that is about half of the rows. A second message tells, of each row that an expert
gets, which of the tokens that arrived it is. Gradients of a token are added up where its experts are, once for each
rank, and then where the token is.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qshard.experts.exchange import PLACE, Exchange, sent_by, values_of

ops = torch.ops.qshard


class Destinations:
    """The ranks that tokens go to: rank i of `ranks` has experts [i * n, (i + 1) * n) of all.

    ids: (T, k), experts of tokens; what is outside of them may be anything's, for it is refused later."""

    def __init__(self, ids: Tensor, experts: int, ranks: int):
        self.slots = ids.shape[1]
        self.ranks = (ids.long() // (experts // ranks)).clamp(0, ranks - 1)
        goes = torch.zeros(len(ids), ranks, dtype=torch.bool, device=ids.device).scatter_(1, self.ranks, True)
        self.counts = goes.sum(0)  # (ranks,): tokens for each rank
        # Rows are sent rank by rank, and to one rank in the order of tokens.
        self._ends = goes.T.reshape(-1).cumsum(0)
        self._rows = torch.where(goes, self._ends.view(ranks, -1).T - 1, len(ids) * ranks)  # (T, ranks); or no row

    def tokens(self, rows: int) -> Tensor:
        """(rows,): the token of each row that is sent, of which the host knows the number."""
        numbers = torch.arange(1, rows + 1, device=self._ends.device)
        return torch.searchsorted(self._ends, numbers) % max(1, len(self._rows))

    def rows(self) -> Tensor:
        """(T, min(k, ranks)): the rows that each token is sent as, by rank; numbers that are no row's fill up."""
        return self._rows.sort(1).values[:, : self.slots]

    def places(self, order: Tensor) -> Tensor:
        """Which row each slot of ids is, among those that go to one rank. order: of the slots (T * k,)."""
        places = self._rows - (self.counts.cumsum(0) - self.counts)
        return places.gather(1, self.ranks).view(-1)[order].to(PLACE)


@dataclass(frozen=True)
class TokensByRank:
    """One such way of tokens, and of what their experts made of them."""

    exchange: Exchange  # of tokens, which stay as they arrive
    index: Tensor  # (sent,): the token of each row that is sent
    sent: Tensor  # (T, min(k, ranks)): Destinations.rows
    taken: Tensor  # (R,): which row that arrived each row of this rank's experts is
    takers: Tensor  # (arrived, k): which rows of experts each became; -1 fills up

    def forth(self, tokens: Tensor) -> Tensor:
        """The rows (R, ...) of this rank's experts, of all ranks' tokens (T, ...)."""
        return self.exchange.forth(tokens[self.index])[self.taken]

    def summed_back(self, rows: Tensor) -> Tensor:
        """(T, N): of each token the sum of its rows, which lie as `forth` gave them, on all ranks."""
        return ops._sum_rows(self.exchange.back(ops._sum_rows(rows, self.takers)), self.sent)


def route(tokens: Exchange, rows: Exchange, to: Destinations, order: Tensor) -> TokensByRank:
    """Tells the ranks which tokens their experts take; order: of the slots, as their rows would be sent. The host does
    not wait."""
    arrived, received = sum(tokens.received), sum(rows.received)
    starts = tokens.from_ranks.cumsum(0) - tokens.from_ranks
    # forth() puts places, which are those of one rank's rows, into the order of experts, and so their ranks' starts.
    places = to.places(order)
    starts = starts.repeat_interleave(rows.from_ranks, output_size=received)
    taken = rows.forth(places) + starts[rows.order]
    by_token, takers = taken.sort(stable=True)
    first = torch.searchsorted(by_token, torch.arange(arrived, device=by_token.device))
    table = takers.new_full((arrived, to.slots), -1)
    table[by_token, torch.arange(received, device=by_token.device) - first[by_token]] = takers
    return TokensByRank(tokens, to.tokens(sum(tokens.sent)), to.rows(), taken, table)


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tokens, format):
        ctx.tokens = tokens
        return sent_by(tokens.forth, x, format)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.tokens.summed_back(values_of(grad)), None, None


def to_experts(x: Tensor, tokens: TokensByRank, format: str | None) -> Tensor:
    """Rows (R, K) of this rank's experts, expert by expert, in the dtype of x (T, K); quantized, where `format` has
    rows."""
    return _ToExperts.apply(x, tokens, format)
