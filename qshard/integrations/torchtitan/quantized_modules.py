"""The modules that torchtitan 0.3 builds where QShardConverter asked for quantized weights."""

import warnings

import qshard
import torch
from qshard import module_state
from qshard.integrations.torchtitan import options
from qshard.integrations.torchtitan.token_dispatcher import TokensInCodes
from qshard.model.state_buffers import without_wrappers
from qshard.nn.linear_subclasses import quantized_class, runs_as_linear
from torch import nn

from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts


def linear_class(cls: type) -> type:
    """What a linear of class `cls` is built as. torchtitan takes hold of a module's forward when it
    parallelizes it, before its weight is quantized, so the class is the quantized one from the start."""
    return quantized_class(cls) if runs_as_linear(cls) else cls


def experts_class(cls: type) -> type:
    """What stacks of experts are built as: their own class, which multiplies by dequantized codes."""
    return cls


def quantize(model: nn.Module, parallel_dims) -> None:
    """Quantizes what the model's modules await, in place, after torchtitan has cut and sharded it."""
    awaiting = [(name, module) for name, module in model.named_modules() if is_awaited(module)]
    if not awaiting:
        raise ValueError(
            "qshard_parallelize: this model has no module that QShardConverter chose; give model_registry "
            "converters=[QShardConverter.Config(...)], and check its filter_fqns"
        )
    tables = {id(m.weight): name for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    by_config = {}  # id of a converter's config: it, and the modules
    for name, module in awaiting:
        config = module_state.find(module).awaits
        _, modules = by_config.setdefault(id(config), (config, []))
        table = tables.get(id(module._parameters.get("weight")))
        if getattr(model, "enable_weight_tying", False) and module is model.lm_head:
            table = "tok_embeddings"  # Decoder.init_states ties them again, which its parallelize untied
        if table is None:
            modules.append(module)
            continue
        warnings.warn(
            f"qshard_parallelize: {name} was left plain: it shares its weight with the embedding {table}, "
            "which looks up its values",
            stacklevel=3,
        )
    _warn_of_what_is_left(model, [config for config, _ in by_config.values()])
    for config, modules in by_config.values():
        _quantize(model, config, modules, parallel_dims)
    for _, module in awaiting:
        module_state.find(module).awaits = None
    for module in model.modules():
        if isinstance(module, RoutedExperts) and isinstance(module.token_dispatcher, TokensInCodes):
            module.token_dispatcher.state = module_state.of(module)
    saves_scales = any(config.checkpoint_scales for config, _ in by_config.values())
    module_state.of(model).saves_scales = saves_scales


def _warn_of_what_is_left(model, configs):
    """Names modules that a converter would have taken, and that are there nevertheless without its mark: an
    override of torchtitan's builds a class of its own where it replaces a config."""
    left = []
    for name, module in model.named_modules():
        if not isinstance(module, (Linear, GroupedExperts)) or is_awaited(module):
            continue
        name = without_wrappers(name)
        is_adapter = name.endswith((".lora_a", ".lora_b"))
        if not is_adapter and not all(options.is_kept_plain(config, name) for config in configs):
            left.append(name)
    if left:
        warnings.warn(
            f"qshard_parallelize: {', '.join(left[:4])}{' and more' if len(left) > 4 else ''} were left "
            "plain: something replaced their configs after QShardConverter (config.override does)",
            stacklevel=4,
        )


def is_awaited(module: nn.Module) -> bool:
    return module_state.find(module).awaits is not None


def _quantize(model, config, modules, parallel_dims):
    """The two kinds lie on meshes of their own, whose dimensions that are not FSDP's have to be told."""
    chosen = {id(module) for module in modules if isinstance(module, nn.Linear)}
    stacks = [p for m in modules if isinstance(m, GroupedExperts) for p in m.parameters() if p.dim() > 2]
    if stacks and config.weight_only:
        raise NotImplementedError(
            "qshard_parallelize: weight_only cannot act on experts, which torchtitan's own forward multiplies; leave "
            'them plain by filter_fqns=["router.gate", "inner_experts"], or give them a converter without it'
        )
    if chosen:
        qshard.quantize_(
            model,
            options.recipe_of(config),
            filter_fn=lambda module, _: id(module) in chosen,
            parameter_fn=lambda *_: False,  # what stays plain was said
            tp_mesh=parallel_dims.get_optional_mesh("tp"),
            **options.arguments(config),
        )
    if stacks:
        stacks = {id(parameter) for parameter in stacks}
        qshard.quantize_(
            model,
            options.recipe_of(config),
            filter_fn=lambda *_: False,
            parameter_fn=lambda parameter, _: id(parameter) in stacks,
            # Tensor parallelism cuts each expert's matrices where no mesh hands experts out.
            tp_mesh=parallel_dims.get_optional_mesh("ep") or parallel_dims.get_optional_mesh("tp"),
            **options.arguments(config),
        )
