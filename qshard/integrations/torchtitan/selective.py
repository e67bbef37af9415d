"""Selective activation checkpointing of torchtitan 0.3 with quantized linears."""

import functools
from dataclasses import dataclass, fields

from qshard.activation_checkpointing import PRODUCTS

from torchtitan.distributed.activation_checkpoint import SelectiveAC


@functools.cache
def _saving(policy: type) -> type:
    """The class of a policy that saves the outputs of quantized linears, too."""

    class Saving(policy):
        @dataclass(kw_only=True, slots=True)
        class Config(policy.Config):
            pass

        def get_save_ops(self) -> set:
            return super().get_save_ops() | PRODUCTS

    Saving.__name__, Saving.__qualname__ = policy.__name__, policy.__qualname__
    return Saving


def saving_quantized_linears(config):
    """The config of a checkpointing policy, which saves them if it is selective by operators."""
    if not isinstance(config, SelectiveAC.Config):
        return config
    values = {f.name: getattr(config, f.name) for f in fields(config) if f.init}
    return _saving(config._owner).Config(**values)
