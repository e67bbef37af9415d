"""What the modules share: initial values that do not depend on how parameters are sharded, and state dicts
of TransformerEngine."""

import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from qshard._runtime.hooks import holds_codes, local_of
from qshard import module_state

# Called with each module of this package whose constructor is done, where quantized_model_init set it.
when_made: ContextVar[Callable[[nn.Module], object] | None] = ContextVar("qshard_when_made", default=None)


class Initialized:
    """A module that knows how its parameters are initialized. After it has added them all, its
    constructor calls `finish`.

    weight_names: of the parameters that `quantize_` quantizes, and multiplies by as weight_only and
        weight_format say."""

    is_constructed = True  # as opposed to an nn.Linear that quantize_ has turned into qshard.nn.Linear
    weight_names: tuple[str, ...] = ()
    weight_only, weight_format = module_state.Shown(), module_state.Shown()
    _initial: dict = {}
    _qshard = module_state.NOTHING  # its ModuleState, which code that is traced looks up by name

    def add_parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        initialize: Callable[[torch.Tensor], object],
        *,
        device=None,
        dtype: torch.dtype | None = None,
        fork: Callable | None = None,
    ) -> None:
        """A parameter whose values `initialize(tensor)` writes, within `fork()` if given."""
        self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.__dict__.setdefault("_initial", {})[name] = initialize, fork or nullcontext

    def finish(self) -> None:
        """Initializes the parameters, and quantizes weights within `quantized_model_init`."""
        self.reset_parameters()
        if quantize_new := when_made.get():
            quantize_new(self)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initial values, quantized where parameters are. Those of a sharded parameter are the ones
        that it would have whole: ranks with one seed get one model, whatever the mesh; memory holds
        one whole parameter at a time. On the meta device there is nothing to do."""
        if defer_init:
            return
        for name, (initialize, fork) in self._initial.items():
            with fork():
                fill(getattr(self, name), initialize)

    def __setstate__(self, state):
        super().__setstate__(state)
        module_state.migrate(self)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        if state_dict.pop(prefix + "_extra_state", None) is not None:
            warn_of_extra_state()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def is_constructed(module: nn.Module) -> bool:
    """Whether a constructor of qshard.nn made a module."""
    return isinstance(module, Initialized) and module.is_constructed


def returned(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A parameter's value as a module's result, in memory of its own: when the call has ended, FSDP may have
    freed that of the parameter."""
    return parameter.to(dtype, copy=True)


def fill(parameter: torch.Tensor, initialize: Callable[[torch.Tensor], object]) -> None:
    """Writes initial values into a parameter, whole and plain or not."""
    local = local_of(parameter)
    if local.is_meta:
        return
    with torch.no_grad():
        if local is parameter and not holds_codes(local):
            initialize(parameter)
            return
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=local.device)
        initialize(values)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            values = distribute_tensor(values, mesh, placements, src_data_rank=None)
        parameter.copy_(values)


@functools.cache
def warn_of_extra_state() -> None:
    """Once: a model has one in each of its modules."""
    warnings.warn(
        "qshard.nn: _extra_state of a TransformerEngine checkpoint is ignored; it holds scales of "
        "TransformerEngine's quantizers, which are computed anew",
        stacklevel=2,
    )
