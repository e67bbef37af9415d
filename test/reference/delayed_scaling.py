"""Delayed scaling of one tensor, step by step (TransformerEngine's DelayedScaling).

`history` is newest last; slot 0 belongs to the step under way. Scales are code_max / amax_in_use, in
which 2^margin is multiplied in already.
"""

from dataclasses import dataclass, field

import torch

from .formats import FLT_MAX


@dataclass
class DelayedScaling:
    length: int = 1024
    margin: int = 0
    most_recent: bool = False
    history: list = field(default_factory=list)
    amax_in_use: float = 0.0  # 0: none yet
    amax_next: float = 0.0
    amax_of_data: float = 0.0

    def __post_init__(self):
        self.history = [0.0] * self.length

    def with_margin(self, amax: float) -> float:
        """0 where an amax gives no scale."""
        if not 0 < amax < float("inf"):
            return 0.0
        return min(torch.tensor(amax * 2.0**self.margin).float().item(), FLT_MAX)

    def flush(self, amax: float) -> float:
        """After initialisation, a load, or a write that is no step: values with the amax of the
        present codes keep their scale, others get their own. Returns the amax to scale by."""
        if not (self.amax_in_use > 0 and amax == self.amax_of_data):
            self.amax_of_data = amax
            self.amax_in_use = self.with_margin(amax)
        return self.amax_in_use

    def step(self, amax: float) -> float:
        """After an optimizer step: scaled by what the step before found."""
        self.amax_in_use = self.amax_next or self.amax_in_use or self.with_margin(amax)
        self.amax_of_data = amax
        self.roll(amax)
        return self.amax_in_use

    def roll(self, amax: float) -> None:
        """A non-finite amax is forgotten; without one above 0 the scale stays."""
        is_finite = 0 <= amax < float("inf")
        self.history[0] = amax if is_finite else 0.0
        largest = self.history[0] if self.most_recent else max(self.history)
        if is_finite and self.with_margin(largest):
            self.amax_next = self.with_margin(largest)
        else:
            self.amax_next = self.amax_next or self.amax_in_use
        self.history = self.history[1:] + self.history[:1]
        self.history[0] = 0.0
