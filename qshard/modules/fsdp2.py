"""What FSDP2 keeps of a module's parameters, for which torch has no public names."""

from torch import nn
from torch.distributed.fsdp import FSDPModule


def groups_of_state(state) -> list:
    """FSDP2's groups of parameters of one module, by its FSDPState."""
    several = getattr(state, "_fsdp_param_groups", None)  # later versions of torch have it
    groups = [state._fsdp_param_group] if several is None else several
    return [group for group in groups if group is not None]


def parameters_of(model: nn.Module) -> list:
    """FSDP2's FSDPParams of a model, each once."""
    modules = (module for module in model.modules() if isinstance(module, FSDPModule))
    groups = {id(group): group for m in modules for group in groups_of_state(m._get_fsdp_state())}
    return [parameter for group in groups.values() for parameter in group.fsdp_params]


def renew(fsdp_param) -> None:
    """Lets FSDP2 look at a sharded parameter anew, whose local tensor is of another kind than before. It made what
    gathers write into, and the unsharded parameter over it, at the first gather, for bytes of that kind
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py: init_all_gather_outputs, init_unsharded_param)."""
    fsdp_param.all_gather_outputs, fsdp_param._unsharded_inner_tensors = [], []
    fsdp_param.__dict__.pop("_unsharded_param", None)
    fsdp_param.reset_sharded_param()
