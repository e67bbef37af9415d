"""What qshard remembers of a module: one object, under one name, in the module's own `__dict__`.

Everything that `quantize_` and its kin note about a module of a user's class lies here, so no attribute of
the user's is read, written or removed. It is looked up in `__dict__` and known by its type: wrappers
(CheckpointWrapper, FSDP1, PEFT, torch.compile) pass attributes of the wrapped module on, and have no state
of their own.
"""

from collections.abc import Callable, Iterator

from torch import nn

from qshard._runtime.hooks import holds_codes, local_of

NAME = "_qshard"


class ModuleState:
    """Pickles of modules hold it: an attribute that is not set has the default below, and attributes only
    ever grow."""

    name = ""  # the module's name in the model that quantize_ was given last; pickles and copies do not keep it
    weight_only = False  # how it multiplies, as quantize_ says
    weight_format: str | None = None  # the format of its weights; None: they are plain
    is_tensor_parallel = False  # whether quantize_ was given a tp_mesh
    parallel = None  # the TensorParallel of its first linear, once a mesh or a style has cut it
    style = None  # its LinearStyle, if a style of qshard.tensor_parallel was applied
    dynamic = None  # the DynamicWeight of a weight that stays plain
    weight_names: tuple[str, ...] = ()  # parameters that quantize_ chose, of a module that is no linear
    # The formats that quantize_ gave to parameters of a module with a forward of its own, for code that is traced, too.
    weight_formats: dict[str, str] | None = None
    told: tuple[str, ...] = ()  # parameters that were quantized, and of which a warning has said that they are plain
    is_persistent = True  # whether `buffers` are in the module's state_dict
    buffers: tuple[str, ...] = ()  # names of the buffers that are linked to states of weights
    scale_group = None  # the Membership of a weight that shares its tensor scale
    gradient_reduction = None  # what reduce_gradients_ gave FSDP2
    hidden = None  # a plain weight in the module's __dict__ that a forward hides
    fsdp1 = None  # what prepare_for_fsdp1 keeps of a root
    saves_scales = False  # torchtitan's checkpoint_scales
    tokens_sent = 0  # bytes of tokens that the last dispatch, its combine and their backward send to other ranks
    sends_tokens_in_codes = False  # torchtitan's tokens = "codes"
    exchange = None  # experts between dispatch and combine keep the Exchange and the format of its rows
    awaits = None  # the options by which qshard_parallelize is to quantize a module of torchtitan's

    def __init__(self):
        self.hooks = {}  # handles of hooks in the module, by what they are for

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name not in ("name", "told")}

    def __setstate__(self, state):
        multiplies = state.pop("multiplies", None)  # in earlier pickles an object of its own
        self.__dict__.update(state, **vars(multiplies) if multiplies is not None else {})

    @property
    def message_format(self) -> str | None:
        """The weight's format, if it is what activations are quantized by."""
        return None if self.weight_only else self.weight_format

    def shown_format(self, module: nn.Module | None = None) -> str:
        """How the module multiplies, for its extra_repr; nothing while it is plain. module: the module itself, if its
        class is none of qshard's linears: of such a module the format is that of its parameters, which are named
        unless all matrices among them have that format."""
        format = self.weight_format
        if format is None and module is not None:
            format = self.dynamic.format if self.dynamic is not None else self._shown_parameters(module)
        if not format:
            return ""
        how = " at each use" * (self.dynamic is not None)
        if self.dynamic is not None and self.dynamic.forward_precision:
            how = f" in backward, forward in {self.dynamic.forward_precision}"
        how += ", weight_only=True" * self.weight_only
        return f", format={format}{how}"

    def _shown_parameters(self, module):
        matrices = {name: p for name, p in module._parameters.items() if p is not None and p.dim() > 1}
        formats = {n: f for n, f in (self.weight_formats or {}).items() if holds_codes(local_of(matrices.get(n)))}
        if len(set(formats.values())) == 1 and formats.keys() == matrices.keys():
            return next(iter(formats.values()))
        return formats and "(" + ", ".join(f"{name}={format}" for name, format in formats.items()) + ")"

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


NOTHING = ModuleState()  # the state of modules that have none; what is to be written asks of()


class Shown:
    """An attribute of its state as one of a module of qshard's, to read and to write. One of that name which
    a user has given to an nn.Linear stays the user's."""

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, module, owner):
        if module is not None and self.name in module.__dict__:
            return module.__dict__[self.name]
        return getattr(NOTHING if module is None else module._qshard, self.name)

    def __set__(self, module, value):
        own = module.__dict__ if self.name in module.__dict__ else vars(of(module))
        own[self.name] = value

    def __delete__(self, module):
        if self.name not in module.__dict__:
            raise AttributeError(self.name)
        del module.__dict__[self.name]


def current(module: nn.Module) -> ModuleState:
    """The state of a module itself, and of none that it wraps; for code that is traced, and asks no module
    that an earlier version may have pickled."""
    state = module.__dict__.get(NAME)
    return state if isinstance(state, ModuleState) else NOTHING


def find(module: nn.Module) -> ModuleState:
    """The state of a module itself, and of none that it wraps."""
    state = current(module)
    return _migrated(module) if state is NOTHING else state


def of(module: nn.Module) -> ModuleState:
    """The state of a module, made if need be."""
    state = find(module)
    if state is NOTHING:
        state = module.__dict__[NAME] = ModuleState()
    return state


def remove_if_empty(module: nn.Module) -> None:
    state = find(module)
    if state is not NOTHING and state.__dict__ == {"hooks": {}}:
        del module.__dict__[NAME]


def dynamic_of(module: nn.Module):
    """The DynamicWeight by which a module uses its plain weight, or None."""
    return find(module).dynamic


def dynamics_of(model: nn.Module) -> Iterator[tuple[nn.Module, object]]:
    """(module, its DynamicWeight) of the modules of a model that have one."""
    for module in model.modules():
        dynamic = dynamic_of(module)
        if dynamic is not None:
            yield module, dynamic


class NamedState:
    """A module whose state of delayed scaling is found by the names that its state_dicts have of it, as DCP
    asks."""

    weight_amax_history = property(lambda self: _state_of(self, 0))
    weight_scaling_amax = property(lambda self: _state_of(self, 1))


NAMES_OF_STATE = ("weight_amax_history", "weight_scaling_amax")  # as quantized weights name them


def _state_of(module, index):
    dynamic = dynamic_of(module)
    if dynamic is None or not dynamic.state:
        raise AttributeError(NAMES_OF_STATE[index])  # nn.Module then looks for a buffer
    return dynamic.state[index]


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


# By their types, among attributes whose names a user may use, too.
_EARLIER_TYPES = {
    "dynamic": ("qshard.dynamic", "DynamicWeight"),
    "parallel": ("qshard.tensor_parallel.local", "TensorParallel"),
    "style": ("qshard.tensor_parallel.styles", "LinearStyle"),
}


def _migrated(module):
    """The state that an earlier version pickled, moved to its place, if there is one. Modules of a user's
    class unpickle as that class says, so this happens when their state is first asked for."""
    attributes, state = module.__dict__, current(module)
    typed = [
        name
        for name, kind in _EARLIER_TYPES.items()
        if (type(attributes.get(name)).__module__, type(attributes.get(name)).__name__) == kind
    ]
    hooks = [name for name in _EARLIER_HOOKS if name in attributes]
    named = [name for name in _EARLIER if name in attributes]
    if not typed and not hooks and not named:
        return state
    if state is NOTHING:
        state = attributes[NAME] = ModuleState()
    for name in typed + named:
        setattr(state, _EARLIER.get(name, name), attributes.pop(name))
    for name in hooks:
        handles = attributes.pop(name)
        state.hooks[_EARLIER_HOOKS[name]] = list(handles) if isinstance(handles, list) else [handles]
    return state


def migrate(module: nn.Module) -> None:
    """Moves what an earlier version pickled of a module of qshard's own to where its forward looks."""
    state, attributes = _migrated(module), module.__dict__
    if attributes.get("weight_format") is None or state.weight_format is not None:
        return
    for name in ("weight_only", "weight_format", "is_tensor_parallel"):
        if name in attributes:
            setattr(of(module), name, attributes.pop(name))
