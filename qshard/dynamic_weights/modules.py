"""Modules whose weights stay plain: what quantize_(weights="dynamic") does to them, and their state dicts."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from qshard._runtime.hooks import holds_codes, local_of
from qshard import module_state
from qshard.dynamic_weights import flat_parameters
from qshard.dynamic_weights.weights import DynamicWeight, Installed, delayed_weights, is_flattened
from qshard.module_state import NAMES_OF_STATE, dynamic_of
from qshard.modules import shown_formats
from qshard.nn.base import Initialized
from qshard.nn.embedding import Embedding
from qshard.nn.linear import Linear
from qshard.nn.linear_subclasses import quantized_class, runs_as_linear

ops = torch.ops.qshard


_WHY_NOT = {
    "stochastic_rounding": "the weights stay plain, and what optimizer steps make of them is not rounded",
    "keep_master=False": "the weights stay plain, and are their own masters",
    "persistent_state=False": "amax histories are in the model's state_dict",
    "tp_mesh": "dynamic weights are whole plain tensors",
    "share_tensor_scale": "dynamic weights have no codes to export",
}


def check_arguments(weights, group, given: dict[str, object]) -> bool:
    """Whether weights are to stay plain; raises for what does not go with it. `given`: of _WHY_NOT, what is
    not left at its default."""
    if weights not in ("quantized", "dynamic"):
        raise ValueError(f'qshard.quantize_: weights is "quantized" or "dynamic", got {weights!r}')
    if weights == "quantized":
        if group is not None:
            raise ValueError(
                'qshard.quantize_: group is for weights="dynamic"; quantized parameters know theirs from '
                "FSDP2"
            )
        return False
    for name in filter(given.get, given):
        raise ValueError(
            f'qshard.quantize_: {name} with weights="dynamic": {_WHY_NOT[name]}; leave one of the two out'
        )
    return True


def refuse_fsdp1(chosen) -> None:
    """Raises if FSDP1 has flattened the weights of modules already."""
    for name, module in chosen:
        if _has_flattened(module):
            raise RuntimeError(
                f"qshard.quantize_: FullyShardedDataParallel has flattened the weight of {name}; call "
                'quantize_(model, recipe, weights="dynamic"), which leaves it as it is, then '
                "qshard.prepare_for_fsdp1(model)"
            )


def _has_flattened(module):
    """Whether FSDP1 has flattened a weight of the module. Without use_orig_params it takes the parameter out, and
    leaves a view in its place."""
    names = module.weight_names if isinstance(module, Initialized) else ("weight",)
    return any(is_flattened(module._parameters.get(n, module.__dict__.get(n))) for n in names)


def quantize_at_each_use(model, chosen, format, weight_only, group) -> None:
    """Makes chosen modules, and linears and embeddings that are tied to them, use their plain weights by
    `DynamicWeight`s. Nothing is changed by what cannot be."""
    identity = weight_identities(model)
    weights = {}
    for name, module in chosen:
        if not _is_usual(module):
            raise TypeError(
                f'qshard.quantize_: weights="dynamic" cannot change how {name}, a '
                f"{type(module).__name__}, multiplies; it needs the forward of nn.Linear, made by torch"
            )
        weight = module.weight
        if holds_codes(local_of(weight)):
            raise TypeError(
                f"qshard.quantize_: the weight of {name} is quantized already; call "
                'qshard.dequantize_(model) before weights="dynamic"'
            )
        shape = module.out_features, module.in_features
        ops.quantize(torch.empty(shape, dtype=weight.dtype, device="meta"), format)
        weights.setdefault(identity(module), (shape, []))[1].append(module)
    for module in model.modules():
        is_known = _is_usual(module) or isinstance(module, nn.Embedding)
        if not is_known or identity(module) not in weights:
            continue
        if all(module is not known for known in weights[identity(module)][1]):
            if isinstance(module, nn.Embedding) and module.max_norm is not None:
                raise NotImplementedError(
                    'qshard.quantize_: weights="dynamic" with an embedding of max_norm, which rewrites '
                    "the weight at each use, that is tied to a linear; leave the linear out by filter_fn"
                )
            weights[identity(module)][1].append(module)
    groups = () if group is None else (group.group_name,)
    for shape, modules in weights.values():
        dynamic = DynamicWeight(format, shape, groups)
        dynamic.uses = len(modules)
        for module in modules:
            uninstall(module)
            if type(module) in (nn.Embedding, Embedding):
                module.__class__ = Embedding
            elif isinstance(module, nn.Embedding):
                _look_up_rounded(module)
            elif runs_as_linear(type(module)):
                module.__class__ = quantized_class(type(module))
            install(module, dynamic)
            if isinstance(module, nn.Linear):
                how = module_state.of(module)
                how.weight_only, how.weight_format = weight_only, format
        dynamic.owner = modules[0]
        weight = modules[0]._parameters.get("weight")
        if isinstance(weight, DTensor) and not all(p.is_replicate() for p in weight.placements):
            dynamic.is_cut = True
        if dynamic.state:
            delayed_weights.add(dynamic)
            dynamic.refresh_owner()


def _is_usual(module):
    """Whether a module multiplies as nn.Linear does. Those that qshard.nn constructs have ways of their own."""
    is_ours = isinstance(module, Linear) and not module.is_constructed
    return is_ours or runs_as_linear(type(module))


def weight_identities(model):
    """A function of a module that tells which have one weight. FSDP1 keeps views of a flat parameter in
    place of parameters; it knows which are shared."""
    shared = {}
    for _, unit in flat_parameters.units(model):
        for name, owner, _, prim_name, prim, _ in unit._handle.flat_param._shared_param_infos:
            if name == prim_name == "weight":
                shared[id(owner)] = id(prim)

    def identity(module):
        weight = module._parameters.get("weight")
        if weight is None or is_flattened(weight):
            return "module", shared.get(id(module), id(module))
        return "weight", id(weight)

    return identity


# ------------------------------------------------------------------------------- in modules


def install(module: nn.Module, dynamic: DynamicWeight) -> None:
    """Lets a module of qshard.nn use its plain weight by `dynamic`."""
    state = module_state.of(module)
    state.dynamic = dynamic
    Installed.count += 1
    if dynamic.state and isinstance(module, nn.Linear):
        state.add_hooks("dynamic", lambda: [
            module.register_state_dict_pre_hook(_show_latest_state),
            module.register_state_dict_post_hook(_hide_state),
            module.register_load_state_dict_pre_hook(_prepare_load),
            module.register_load_state_dict_post_hook(_after_load),
        ])


def uninstall(module: nn.Module) -> None:
    state = module_state.find(module)
    if state.dynamic is not None:
        state.forget("dynamic")
        Installed.count += 1
    state.remove_hooks("dynamic", "lookup")


# An embedding of a user's class computes what it likes of its weight. During its forward, `weight` is found in
# the module's __dict__, before nn.Module looks among parameters: what the codes stand for.


def _look_up_rounded(module):
    shown_formats.show(module)
    module_state.of(module).add_hooks("lookup", lambda: [
        module.register_forward_pre_hook(_show_rounded),
        module.register_forward_hook(_hide_rounded, always_call=True),
    ])


def _show_rounded(module, *_):
    weight, state = module.weight, module_state.of(module)
    if "weight" in module.__dict__:  # FSDP1's view of a flat parameter
        state.hidden = weight
    module.__dict__["weight"] = state.dynamic.rounded(module, weight)


def _hide_rounded(module, *_):
    state = module_state.of(module)
    module.__dict__.pop("weight", None)
    if state.hidden is not None:
        module.__dict__["weight"] = state.hidden
        state.forget("hidden")


# The state is the module's buffers only while a state_dict is made or loaded: wrappers cast, move and
# broadcast buffers.


def _show_latest_state(module, *_):
    dynamic_of(module).refresh_owner()
    _show_state(module)


def _show_state(module, *_):
    module._buffers.update(zip(NAMES_OF_STATE, dynamic_of(module).state))


def _hide_state(module, *_):
    for name in NAMES_OF_STATE:
        module._buffers.pop(name, None)


def _prepare_load(module, state_dict, prefix, *_):
    _show_state(module)
    for name, tensor in zip(NAMES_OF_STATE, dynamic_of(module).state):
        state_dict.setdefault(prefix + name, tensor)  # checkpoints without one load, too


def _after_load(module, *_):
    for name, tensor in zip(NAMES_OF_STATE, dynamic_of(module).state):
        loaded = module._buffers.get(name)
        if loaded is not None and loaded is not tensor and not loaded.is_meta:  # assign=True
            tensor.copy_(loaded)
    _hide_state(module)
    # Values and state of one moment agree; else the values have another amax, and get its scale.
    dynamic_of(module)._seen = None
    dynamic_of(module).refresh_owner()
