"""Tensor parallelism of the modules, by TransformerEngine's arguments."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from qshard._runtime.hooks import holds_codes, local_of
from qshard import module_state
from qshard.nn.parts.arguments import refuse_context_parallelism
from qshard.tensor_parallel.local import TensorParallel


class DeviceMeshes:
    """A module with parameters, over a mesh of tensor-parallel ranks."""

    _qshard = module_state.NOTHING  # its ModuleState, as of Initialized
    sequence_parallel = False
    fuse_wgrad_accumulation = False

    def parallel_modes(self) -> dict[str, str | None]:
        """By the names of weights and biases, the mode of their linear."""
        return {}

    @property
    def is_of_own_tokens(self) -> bool:
        """Whether activations around it are of tokens, or heads, that no other rank has."""
        return bool(self.sequence_parallel)

    def set_device_mesh(self, tp_mesh=None, weight_mesh=None) -> None:
        """Makes the parameters DTensors over the tensor-parallel ranks, by parallel_mode: "column" cuts
        weights and biases by rows, "row" weights by columns; what is not cut is whole on every rank.
        Forward takes and returns plain local tensors. Call it once, on all ranks, before `quantize_` and
        `fully_shard`; nothing is sent: each rank keeps its part of the values that it has, so that ranks
        with one seed get one model.

        tp_mesh: a DeviceMesh of one dimension; for `fully_shard` one of the mesh of its own, such as
            mesh["tp"].
        weight_mesh: of the ranks that share a weight, (FSDP's shards x tensor parallelism) flattened.
            The parameters' placements say who they are, so it is only checked to hold tp_mesh's."""
        if weight_mesh is not None:
            self._check_weight_mesh(tp_mesh, weight_mesh)
        if tp_mesh is None:
            return
        modes = self.parallel_modes()
        parallel = TensorParallel.over(
            tp_mesh, next(iter(modes.values()), None), 0 if self.is_of_own_tokens else None
        )
        placements = {
            name: parallel.in_mode(mode).placement_of(self._parameters[name])
            for name, mode in modes.items()
            if self._parameters[name] is not None
        }
        self._check_device_mesh(parallel.ranks, placements)
        for name, parameter in list(self._parameters.items()):
            if parameter is None:
                continue
            with torch.no_grad():
                value = distribute_tensor(
                    parameter.detach(),
                    tp_mesh,
                    (placements.get(name, Replicate()),),
                    src_data_rank=None,
                )
            self._parameters[name] = nn.Parameter(value, requires_grad=parameter.requires_grad)
        module_state.of(self).parallel = parallel

    def set_tensor_parallel_group(self, tp_group) -> None:
        """set_device_mesh over the ranks of a process group. `fully_shard` needs meshes with one root:
        with it use set_device_mesh."""
        if tp_group is None:
            return
        device = next((p.device.type for p in self.parameters()), "meta")
        if device == "meta":
            device = dist.distributed_c10d._get_pg_default_device(tp_group).type
        self.set_device_mesh(DeviceMesh.from_group(tp_group, device))

    def parallelize(self, tp_group, tp_size, tp_mesh, weight_mesh) -> None:
        """What the constructor was given."""
        ranks = check_ranks(type(self).__name__, tp_group, tp_size, tp_mesh)
        if tp_mesh is not None:
            self.set_device_mesh(tp_mesh, weight_mesh)
        elif ranks > 1:
            self.set_tensor_parallel_group(tp_group)

    def set_context_parallel_group(self, cp_group, *args, **kwargs) -> None:
        """Raises NotImplementedError for a group of more than one rank."""
        refuse_context_parallelism(type(self).__name__, cp_group)

    @property
    def message_format(self) -> str | None:
        """The weight's format, if it is what activations are quantized by."""
        return self._qshard.message_format

    def _check_weight_mesh(self, tp_mesh, weight_mesh):
        module = f"qshard.nn.{type(self).__name__}.set_device_mesh"
        if not isinstance(weight_mesh, DeviceMesh) or weight_mesh.ndim != 1:
            raise ValueError(
                f"{module}: weight_mesh must be a DeviceMesh of one dimension, got {weight_mesh!r}"
            )
        if tp_mesh is None or set(self.parallel_modes().values()) == {None}:
            return
        if not set(tp_mesh.mesh.flatten().tolist()) <= set(weight_mesh.mesh.flatten().tolist()):
            raise ValueError(
                f"{module}: weight_mesh {weight_mesh} does not hold the ranks of {tp_mesh}; flatten the "
                "dimensions that shard weights, tensor parallelism among them"
            )

    def _check_device_mesh(self, ranks, placements):
        module = f"qshard.nn.{type(self).__name__}.set_device_mesh"
        if self.fuse_wgrad_accumulation:
            raise NotImplementedError(
                f"{module}: fuse_wgrad_accumulation is not supported with tensor parallelism; an eager "
                "backward adds to an existing .grad within the GEMM"
            )
        for name, parameter in self._parameters.items():
            if parameter is None:
                continue
            if isinstance(parameter, DTensor):
                raise RuntimeError(
                    f"{module}: {name} is a DTensor on {parameter.device_mesh} already; call it once, "
                    "before fully_shard"
                )
            if holds_codes(local_of(parameter)):
                raise RuntimeError(f"{module}: {name} is quantized already; call it before quantize_")
        for name, placement in placements.items():
            shape = self._parameters[name].shape
            if placement.is_shard():
                size = shape[placement.dim]
                if -(-size // ranks) * (ranks - 1) >= size:
                    raise NotImplementedError(
                        f"{module}: {ranks} ranks would leave some of them nothing of {name} of shape "
                        f"{tuple(shape)}, cut by {placement}"
                    )


def check_ranks(module: str, tp_group=None, tp_size: int = 1, tp_mesh=None) -> int:
    """The number of tensor-parallel ranks that a constructor was given."""
    size = tp_size
    if tp_mesh is not None:
        if tp_group is not None:
            raise ValueError(f"qshard.nn.{module}: tp_mesh and tp_group: leave one of the two out")
        size = tp_mesh.size()
    elif tp_group is not None:
        size = dist.get_world_size(tp_group)
    elif tp_size != 1:
        raise NotImplementedError(
            f"qshard.nn.{module}: tp_size={tp_size} without its ranks is not supported; give tp_mesh "
            "or tp_group, or leave it at 1 and call set_device_mesh"
        )
    if tp_size not in (1, size):
        raise ValueError(
            f"qshard.nn.{module}: tp_size={tp_size}, and the mesh or group has {size} ranks"
        )
    return size
