"""What some formats remember between flushes, as buffers of the modules that hold the weights: amaxes
of delayed scaling, the count of stochastic rounding.

The tensors belong to the weight and go where it goes. A module's buffers are linked to them whenever a
state_dict is made or loaded, which is when anyone looks; in between `to_empty`, `cuda()` and the like
may give the weight other ones.
"""

import hashlib

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from qshard import module_state
from qshard._runtime.classes import TensorState
from qshard._runtime.hooks import holds_codes, local_of
from qshard._runtime.placement import chunk, group_names, place, roles_of, with_local
from qshard.nn.base import Initialized

ops = torch.ops.qshard
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # parts of names that wrappers add


def weights(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """What a module may multiply by, with its names."""
    if isinstance(module, Initialized):
        names = module.weight_names
    else:
        names = module_state.find(module).weight_names or ("weight",)
    return [(name, w) for name in names if (w := module._parameters.get(name)) is not None]


def name_weight(module: torch.nn.Module, name: str) -> None:
    """One more parameter, of a module that is no linear."""
    state = module_state.of(module)
    state.weight_names = tuple(dict.fromkeys((*state.weight_names, name)))


def link(module: torch.nn.Module) -> None:
    """Makes the state of a module's weights its buffers <weight>_<name>."""
    tensors = tensors_of(module)
    if not tensors:
        return
    state = module_state.of(module)
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor, persistent=state.is_persistent)
    state.buffers = tuple(dict.fromkeys((*state.buffers, *tensors)))
    state.add_hooks("link", lambda: [module.register_state_dict_pre_hook(_link_before)])


def hand_out_masters(module: torch.nn.Module) -> None:
    """Puts masters, as plain tensors, into the module's state_dicts: they can be saved, and loaded
    where qshard is not installed. They are the memory itself; what is loaded into them is seen. Other tensors
    without a master stay what they are. A DTensor's operators write its local tensor below autograd, where
    no version counter moves, so that is a view which hears of writes on every rank, as DCP's loads need, and
    is pickled as plain values."""
    state = module_state.of(module)
    state.add_hooks("masters", lambda: [module.register_state_dict_post_hook(_put_masters)])


def _put_masters(module, state_dict, prefix, local_metadata):
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if value is None or value is parameter:
            continue  # keep_vars=True asks for the parameters themselves
        local = local_of(value)
        if not holds_codes(local) or local.is_meta:
            continue
        if local is not value:
            state_dict[prefix + name] = with_local(TensorState(local).export_view(), value)
            continue
        master = ops.master(local)
        if master is not None:
            state_dict[prefix + name] = master


def unlink(module: torch.nn.Module) -> None:
    """Takes out what `link` put into a module, whose weights may have no such state any more."""
    state = module_state.find(module)
    for name in state.buffers:
        if name in module._buffers:
            delattr(module, name)
    state.forget("buffers")
    state.remove_hooks("link")


def linked_to(model: torch.nn.Module, parameters) -> list[torch.nn.Module]:
    """The modules with buffers that are state of one of these parameters."""
    ids = {id(parameter) for parameter in parameters}
    return [m for m in model.modules() if has_buffers(m) and any(id(w) in ids for _, w in weights(m))]


def has_buffers(module: torch.nn.Module) -> bool:
    """Whether `link` has put states of its weights into the module."""
    return bool(module_state.find(module).buffers)


def _link_before(module, *_):
    link(module)


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state of a module's weights, as state_dicts have it."""
    return {
        f"{name}_{part}": tensor
        for name, weight in weights(module)
        if holds_codes(local_of(weight))
        for part, tensor in _saved_state(weight).items()
    }


def _saved_state(weight):
    tensors = TensorState(local_of(weight)).scaling_state()
    return {part: _of_all_ranks(weight, tensor) for part, tensor in tensors.items()}


def _of_all_ranks(weight, tensor):
    """A state of a weight as what is saved of it: of a stack whose matrices an expert mesh hands out, one
    DTensor of the rows of all its ranks, since each knows its own matrices alone."""
    dimension = _expert_dimension(weight) if tensor.dim() > 1 else None
    if dimension is None:
        return tensor
    mesh, matrices = weight.device_mesh, weight.shape[0]
    placements = [Shard(0) if i == dimension else Replicate() for i in range(mesh.ndim)]
    # Each rank has rows for its matrices and for its activations: torch.chunk's parts of their sum.
    _, of_rank = chunk(matrices, mesh.size(dimension), mesh.get_local_rank(dimension))
    of_activations = tensor.shape[0] - of_rank
    whole = torch.Size((matrices + mesh.size(dimension) * of_activations, tensor.shape[1]))
    return DTensor.from_local(
        tensor, mesh, placements, run_check=False, shape=whole, stride=(whole[1], 1)
    )


def _expert_dimension(weight):
    """The dimension of a weight's mesh that hands out the matrices of a stack; None if none does."""
    if not isinstance(weight, DTensor) or weight.dim() < 3:
        return None
    local, mesh, shape = local_of(weight), weight.device_mesh, weight.shape
    logical_rows, _, _ = TensorState(local).logical_tensor()
    if logical_rows == shape[:-1].numel():
        return None  # all matrices, of which FSDP cut rows
    groups = TensorState(local).groups()
    rows, cuts, _ = roles_of(weight, "a stack")
    if place(mesh, weight.placements, shape, groups, is_quantized=True).logical_rows != logical_rows:
        cuts = [*cuts, rows]  # nothing but the number of matrices tells this dimension from FSDP's
    # Tensor parallelism may cut each matrix besides.
    return next((i for i in cuts if weight.placements[i].dim == 0), None)


def tensor_groups(weight: torch.Tensor) -> list[str]:
    """Names of the groups whose ranks have tensors of their own: of tensor parallelism, and of experts."""
    groups, dimension = TensorState(local_of(weight)).groups(), _expert_dimension(weight)
    return groups if dimension is None else [*groups, group_names(weight.device_mesh)[dimension]]


def fill_missing(module: torch.nn.Module, state_dict: dict, prefix: str) -> None:
    """Lets a module keep its state if a state_dict, of a plain model say, has none."""
    if not module_state.of(module).is_persistent:
        return
    for name, tensor in tensors_of(module).items():
        state_dict.setdefault(prefix + name, tensor)


def load(weight: torch.Tensor, state_dict: dict, weight_key: str) -> None:
    """Loads the state of a new weight from what a state_dict has of it, and puts it in its place."""
    for name, tensor in _saved_state(weight).items():
        key = f"{weight_key}_{name}"
        if key in state_dict:
            # torch leaves the meta model's own tensor where a full state_dict has none.
            if not state_dict[key].is_meta:
                tensor.copy_(state_dict[key])
            state_dict[key] = tensor


def copy_values(weight: torch.Tensor, source: torch.Tensor) -> None:
    """Copies a quantized tensor into a weight, which keeps what its format remembers of training."""
    state = {name: tensor.clone() for name, tensor in TensorState(weight).scaling_state().items()}
    weight.copy_(source)
    for name, tensor in TensorState(weight).scaling_state().items():
        tensor.copy_(state[name])


def set_rounding_key(weight: torch.Tensor, fqn: str) -> None:
    """Keys stochastic rounding with torch's seed and the parameter's name."""
    if "rounding" in TensorState(weight).scaling_state():
        name = without_wrappers(fqn).encode()
        name_hash = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
        TensorState(weight).set_rounding_key((torch.initial_seed() + name_hash) % 2**62)


def without_wrappers(fqn):
    for wrapper in _WRAPPERS:
        fqn = fqn.replace(wrapper, "")
    return fqn
