"""The cross entropy of logits and its gradient, in float64."""

import torch

from .activations import quantize_1x128, quantize_tensorwise
from .formats import encode


def cross_entropy(logits, target, ignore_index=-100, label_smoothing=0.0):
    """The loss of each token (M,), and the gradient (M, V) of their sum by the logits."""
    logits = logits.double()
    is_counted = target != ignore_index
    log_probabilities = logits - torch.logsumexp(logits, 1, keepdim=True)
    wanted = torch.full_like(logits, label_smoothing / logits.shape[1])
    rows = is_counted.nonzero()[:, 0]
    wanted[rows, target[rows]] += 1 - label_smoothing
    # A logit of -inf that is not asked for adds nothing.
    losses = -torch.where(wanted == 0, 0.0, log_probabilities * wanted).sum(1)
    losses = torch.where(log_probabilities.isnan().any(1), torch.nan, losses)
    gradient = log_probabilities.exp() - wanted
    return torch.where(is_counted, losses, 0.0), torch.where(is_counted[:, None], gradient, 0.0)


def gradient_codes(values, in_blocks: bool, power_of_two: bool = True):
    """(codes, scale_inv) by rows of a gradient that lies between -1 and 1."""
    if in_blocks:
        return quantize_1x128(values, power_of_two=power_of_two)
    # The scale of an amax of 1.
    _, scale_inv = quantize_tensorwise(torch.ones(1), torch.float8_e5m2, power_of_two)
    return encode(values, 1 / scale_inv, torch.float8_e5m2), scale_inv
