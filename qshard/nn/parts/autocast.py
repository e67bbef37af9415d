"""The dtype of activations."""

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """autocast's on the device of x, or None where it is off."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def activation_dtype(x: Tensor) -> torch.dtype:
    """autocast's, else the input's own."""
    return autocast_dtype(x) or x.dtype
