"""What jobs of torchtitan, of both versions, are given in place of what CPUs and tests do not have."""

from unittest import mock

import torch

_histc = torch.histc


def cpu_as_accelerator():
    """torchtitan looks for an accelerator when it is imported; here it finds the CPU."""
    return mock.patch("torch._utils._get_available_device_type", lambda: "cpu")


def histc_of_integers():
    """CPUs have torch.histc for floats alone."""
    return mock.patch("torch.histc", lambda x, **kwargs: _histc(x.float(), **kwargs).long())


class Nothing:
    """A data loader without a position."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass
