"""What qshard remembers of a module: one object, under one name, in the module's own `__dict__`.

Everything that `quantize_` and its kin note about a module of a user's class lies here, so no attribute of
the user's is read, written or removed. It is looked up in `__dict__` and known by its type: wrappers
(CheckpointWrapper, FSDP1, PEFT, torch.compile) pass attributes of the wrapped module on, and have no state
of their own.
"""

from collections.abc import Callable, Iterator

from torch import nn

NAME = "_qshard"


class ModuleState:
    """Pickles of modules hold it: an attribute that is not set has the default below, and attributes only
    ever grow."""

    dynamic = None  # the DynamicWeight of a weight that stays plain
    weight_names: tuple[str, ...] = ()  # parameters that parameter_fn chose, of a module that is no linear
    is_persistent = True  # whether `buffers` are in the module's state_dict
    buffers: tuple[str, ...] = ()  # names of the buffers that are linked to states of weights
    scale_group = None  # the Membership of a weight that shares its tensor scale
    multiplies = None  # how a subclass of nn.Linear does (qshard/nn/linear_subclasses.py)
    gradient_reduction = None  # what reduce_gradients_ gave FSDP2
    hidden = None  # a plain weight in the module's __dict__ that a forward hides
    fsdp1 = None  # what prepare_for_fsdp1 keeps of a root
    saves_scales = False  # torchtitan's checkpoint_scales

    def __init__(self):
        self.hooks = {}  # handles of hooks in the module, by what they are for

    def add_hooks(self, purpose: str, register: Callable[[], list]) -> None:
        """Registers hooks, once for each purpose."""
        if purpose not in self.hooks:
            self.hooks[purpose] = register()

    def remove_hooks(self, *purposes: str) -> None:
        for purpose in purposes:
            for handle in self.hooks.pop(purpose, ()):
                handle.remove()

    def forget(self, *names: str) -> None:
        """Takes attributes back to their defaults."""
        for name in names:
            self.__dict__.pop(name, None)


def find(module: nn.Module) -> ModuleState | None:
    """The state of a module itself, and of none that it wraps."""
    state = module.__dict__.get(NAME)
    if isinstance(state, ModuleState):
        return state
    return _migrated(module)


def of(module: nn.Module) -> ModuleState:
    """The state of a module, made if need be."""
    state = find(module)
    if state is None:
        state = module.__dict__[NAME] = ModuleState()
    return state


def remove_if_empty(module: nn.Module) -> None:
    state = find(module)
    if state is not None and state.__dict__ == {"hooks": {}}:
        del module.__dict__[NAME]


def dynamic_of(module: nn.Module):
    """The DynamicWeight by which a module uses its plain weight, or None."""
    state = find(module)
    return None if state is None else state.dynamic


def dynamics_of(model: nn.Module) -> Iterator[tuple[nn.Module, object]]:
    """(module, its DynamicWeight) of the modules of a model that have one."""
    for module in model.modules():
        dynamic = dynamic_of(module)
        if dynamic is not None:
            yield module, dynamic


# --------------------------------------------------------------------- pickles of earlier versions

# These kept each of the above as an attribute of the module.
_EARLIER = {
    "_qshard_weight_names": "weight_names",
    "_qshard_persistent_state": "is_persistent",
    "_qshard_state_names": "buffers",
    "_qshard_scale_group": "scale_group",
    "_qshard_reduce_scatter": "gradient_reduction",
    "_qshard_checkpoint_scales": "saves_scales",
}
_EARLIER_HOOKS = {
    "_qshard_load_hook": "assign",
    "_qshard_flush_hook": "flush",
    "_qshard_masters_hook": "masters",
    "_qshard_state_hook": "link",
    "_qshard_dynamic_hooks": "dynamic",
}


def _migrated(module):
    """The state that an earlier version pickled, moved to its place; None if there is none. Modules of a
    user's class unpickle as that class says, so this happens when their state is first asked for."""
    attributes = module.__dict__
    found = [n for n in attributes if n.startswith("_qshard_") and (n in _EARLIER or n in _EARLIER_HOOKS)]
    dynamic = attributes.get("dynamic")
    is_dynamic = type(dynamic).__name__ == "DynamicWeight" and type(dynamic).__module__ == "qshard.dynamic"
    if not found and not is_dynamic:
        return None
    state = ModuleState()
    for name in found:
        value = attributes.pop(name)
        if name in _EARLIER:
            setattr(state, _EARLIER[name], value)
        else:
            state.hooks[_EARLIER_HOOKS[name]] = list(value) if isinstance(value, list) else [value]
    if is_dynamic:
        state.dynamic = attributes.pop("dynamic")
    attributes[NAME] = state
    return state
