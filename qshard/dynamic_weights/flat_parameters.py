"""Where FSDP1 keeps parameters: one after the other in the flat parameter of a unit, which is cut into
equal shards."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from qshard import module_state
from qshard.dynamic_weights.weights import DynamicWeight

# What is read of a flat parameter.
ATTRIBUTES = ("_param_infos", "_shapes", "_numels_with_padding", "_is_padding_mask", "_sharded_size")


@dataclass(frozen=True)
class Place:
    """A parameter of a unit: elements [start, start + numel) of its flat parameter."""

    index: int  # among the unit's parameters
    module: nn.Module
    param_name: str
    shape: torch.Size
    start: int
    numel: int

    @property
    def end(self) -> int:
        return self.start + self.numel


def places(flat) -> Iterator[Place]:
    """Each parameter of a flat one, in order; between them is alignment."""
    infos = iter(enumerate(zip(flat._param_infos, flat._shapes)))
    position = 0
    for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask):
        if not is_padding:
            index, (info, shape) = next(infos)
            yield Place(index, info.module, info.param_name, shape, position, numel)
        position += numel


def dynamic_of(flat, place: Place) -> DynamicWeight | None:
    """The DynamicWeight of the module that has the parameter, or of one that shares it."""
    owners = [place.module] if place.param_name == "weight" else []
    for shared in flat._shared_param_infos:
        name, module, _, prim_name, prim, _ = shared
        if prim is place.module and prim_name == place.param_name and name == "weight":
            owners.append(module)
    for owner in owners:
        dynamic = module_state.dynamic_of(owner)
        if dynamic is not None and tuple(place.shape) == tuple(dynamic.shape):
            return dynamic
    return None


def is_sharded(handle) -> bool:
    return handle.uses_sharded_strategy and handle.world_size > 1


def shard_numel(handle) -> int:
    """Elements of the flat parameter that each rank has, padding included."""
    flat = handle.flat_param
    return flat._sharded_size.numel() if handle.uses_sharded_strategy else flat.numel()


def range_on(rank: int, numel: int, start: int, end: int) -> tuple[int, int]:
    """What a rank with `numel` elements has of [start, end)."""
    begin = max(rank * numel, start)
    return begin, max(begin, min((rank + 1) * numel, end))


def units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(prefix of the parameters' names, FSDP1's module) of each unit of a model."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and getattr(module, "_handle", None) is not None:
            parts = [part for part in name.split(".") if part not in ("", "_fsdp_wrapped_module")]
            yield "".join(part + "." for part in parts), module
