"""Linears of one rank: plain tensors in and out, parameters that are DTensors for FSDP2 and DCP.

The local part of a parameter is multiplied, and collectives on plain tensors stand around the one
operator; DTensor is not asked in forward or backward.
"""

import functools
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from qshard._runtime.classes import Process
from qshard._runtime.hooks import holds_codes, local_of
from qshard._runtime.library import mark_local_part
from qshard._runtime.placement import group_names
from qshard.modules.module_apply import distributed
from qshard.tensor_parallel import collectives
from qshard.tensor_parallel.shared import current_slot, shared

MODES = {"column": 0, "row": 1, None: None}  # the dimension of a weight that the ranks cut


@dataclass(frozen=True)
class TensorParallel:
    """How a module is parallel over a mesh of one dimension.

    mode: "column", "row" or None.
    sequence_dim: of activations outside the module, which the ranks cut; None: they hold them whole.
    """

    mesh: DeviceMesh
    group: str
    ranks: int
    mode: str | None
    sequence_dim: int | None

    @classmethod
    def over(cls, mesh, mode, sequence_dim=None):
        """Raises where a mesh is none of one dimension."""
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            raise ValueError(f"qshard: tp_mesh must be a DeviceMesh of one dimension, got {mesh!r}")
        (group,) = group_names(mesh)
        return cls(mesh, group, mesh.size(), mode, sequence_dim)

    @property
    def cuts_output_tokens(self):
        return self.sequence_dim is not None and self.mode != "column"

    def __deepcopy__(self, memo):
        return self  # meshes and groups are those of the process

    def in_mode(self, mode):
        return replace(self, mode=mode)

    def placement_of(self, parameter):
        """The placement of a weight (rows, columns) or a bias (rows,)."""
        dim = MODES[self.mode]
        return Shard(dim) if dim is not None and dim < parameter.dim() else Replicate()

    def enter(self, x, format, weights):
        """The input of the local linear of what the module is given. format: of the weight, by which the
        input is quantized, or None. weights: that the module then reads."""
        _refuse_transforms()
        if isinstance(x, DTensor):
            raise TypeError(
                f"qshard.nn: a module over a tp_mesh takes plain local tensors, and was given a DTensor "
                f"placed as {x.placements}; call x.to_local()"
            )
        if self.mode != "column" or self.ranks == 1:
            return x
        if self.sequence_dim is None:
            make = lambda: collectives.copy_to_ranks(x, self.group)  # noqa: E731
        else:
            check_can_be_read(weights)
            dim, format = self._dim(x), format or ""
            make = lambda: collectives.gather_input(x, dim, format, self.group)  # noqa: E731
        return shared(x, (self, format), make)

    def gather_values(self, x):
        """The tokens of all ranks."""
        if self.ranks == 1:
            return x
        return collectives.gather_input(x, self._dim(x), "", self.group)

    def leave(self, y, format):
        """What the module returns of the output of the local linear."""
        if self.mode != "row" or self.ranks == 1:
            return y
        if self.sequence_dim is None:
            return collectives.sum_over_ranks(y, self.group)
        return collectives.scatter_sum(y, self._dim(y), format or "", self.group)

    def check_output(self, x):
        """Raises, on all ranks, where the tokens of a row's output cannot be cut."""
        if self.mode == "row" and self.sequence_dim is not None:
            dim = self._dim(x)
            if x.shape[dim] % self.ranks:
                raise ValueError(
                    f"qshard.nn.Linear: sequence parallelism cuts dimension {dim} of an output of shape "
                    f"{(*x.shape[:-1], '...')} into {self.ranks} equal parts; pad it to a multiple"
                )

    def _dim(self, x):
        dim = self.sequence_dim + (x.ndim if self.sequence_dim < 0 else 0)
        if not 0 <= dim < x.ndim - 1:
            raise ValueError(
                f"qshard.nn.Linear: sequence parallelism cuts dimension {self.sequence_dim}, and an "
                f"activation of shape {tuple(x.shape)} has no such dimension of tokens"
            )
        return dim

    def weight(self, parameter):
        """The local part of a weight, for the linear."""
        return local_part(parameter, self.mode is None and self.sequence_dim is not None)

    def bias(self, parameter):
        """The local part of a bias, for the linear: of what is summed one rank adds it."""
        if parameter is None:
            return None
        if self.mode == "row":
            return OnOneRank.apply(local_part(parameter), self.mesh.get_local_rank() == 0)
        return local_part(parameter, self.mode is None and self.sequence_dim is not None)

    def local(self, weight, bias):
        return self.weight(weight), self.bias(bias)

    def replicated(self, parameter):
        """The local part of a parameter that is used before the linear, such as a norm's."""
        if parameter is None:
            return None
        return local_part(parameter, is_summed=self.sequence_dim is not None and self.mode != "row")


def _local_tensors(parameter):
    """The local tensors of a DTensor and of its gradient, or None if these are placed differently."""
    grad = parameter.grad
    if not isinstance(grad, DTensor):
        return None
    is_alike = grad.placements == parameter.placements and grad.device_mesh == parameter.device_mesh
    return (parameter._local_tensor, grad._local_tensor) if is_alike else None


def _refuse_transforms():
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "qshard.nn: torch.func's transforms are not supported over tensor parallelism; use autograd"
        )


def check_can_be_read(weights):
    """Raises, on all ranks and before anything is sent, where one was written and its codes wait for
    the flush that all ranks take part in: the linear would say so after the ranks have gathered its
    input."""
    if torch.compiler.is_compiling():
        return
    parts = [local_of(weight) for weight in weights]
    Process.check_codes_can_be_read([part for part in parts if holds_codes(part)])


def local_part(parameter: torch.Tensor, is_summed: bool = False) -> torch.Tensor:
    """The local tensor of a DTensor on a mesh of one dimension, or a plain tensor itself. is_summed: the
    gradient is this rank's term of a sum."""
    if not isinstance(parameter, DTensor):
        return parameter
    if parameter.device_mesh.ndim != 1:
        raise NotImplementedError(
            f"qshard.nn: a parameter is placed as {parameter.placements} on a mesh of "
            f"{parameter.device_mesh.ndim} dimensions; under fully_shard parameters are there in forward "
            "of the module that it was applied to"
        )
    _refuse_transforms()
    if torch.compiler.is_compiling():
        placements = (Partial(),) if is_summed else None
        return parameter.to_local(grad_placements=placements)
    if is_summed:
        return _SummedPart.apply(parameter)
    part = _LocalPart.apply(parameter)
    if parameter.is_leaf:
        # wgrad may be added to the local part of a leaf's .grad within the GEMM (ops/linear/leaf_grad.h).
        mark_local_part((part, functools.partial(_local_tensors, parameter)))
    return part


class _LocalPart(torch.autograd.Function):
    """No gradient comes by here where the linear has added it to the leaf's."""

    @staticmethod
    def forward(ctx, parameter):
        ctx.spec, ctx.slot = parameter._spec, current_slot()
        ctx.set_materialize_grads(False)
        return parameter._local_tensor.view_as(parameter._local_tensor)

    @staticmethod
    def backward(ctx, grad):
        ctx.slot.forget()
        return None if grad is None else distributed(grad, ctx.spec)


class _SummedPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter):
        ctx.spec = parameter._spec
        ctx.set_materialize_grads(False)
        return parameter._local_tensor.view_as(parameter._local_tensor)

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return None
        (group,) = group_names(ctx.spec.mesh)
        return distributed(collectives.all_reduced(grad, group) if group else grad, ctx.spec)


class OnOneRank(torch.autograd.Function):
    """A term of a sum over ranks that all of them hold: added by one, with the gradient on all."""

    @staticmethod
    def forward(ctx, term, is_here):
        return term.view_as(term) if is_here else torch.zeros_like(term)

    @staticmethod
    def backward(ctx, grad):
        return grad, None
