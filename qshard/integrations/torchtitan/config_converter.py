"""A model-config converter for torchtitan 0.3, and what goes round a model's parallelize_fn.

The converter changes what linears and experts are built as, and quantizes nothing: under tensor and expert
parallelism torchtitan registers parts of weights in the place of the weights that a model was built with
(Module._distribute_states), and no quantized tensor outlives that. So the function round parallelize_fn
quantizes the modules that the converter marked, where each parameter is a DTensor that says how it is cut.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Literal

import torch
from qshard import module_state
from qshard.integrations.torchtitan import options, quantized_modules, token_dispatcher
from qshard.integrations.torchtitan.checkpoints import checkpoint_beside
from qshard.integrations.torchtitan.selective import saving_quantized_linears

from torchtitan.components import checkpoint
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.protocols.module import Module


class QShardConverter(QuantizationConverter):
    """Has the linears of a model, and stacks of experts, built as modules whose weights `qshard_parallelize`
    quantizes. For model_registry(..., converters=[QShardConverter.Config(...)]); several converters, each
    with filter_fqns of its own, make a model of several recipes: the last that takes a module counts."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        recipe: str = "float8_blockwise"
        """Format of the weights, and with it how activations and gradients are quantized,
        by the name of a recipe's format"""

        amax_history_len: int = 1024
        """For float8_delayed: optimizer steps that are remembered"""

        keep_master: bool = True
        """Keep each weight's full-precision value beside its codes"""

        weight_only: bool = False
        """Leave activations and gradients in their dtype"""

        stochastic_rounding: bool = False
        """For keep_master=False"""

        checkpoint_scales: bool = False
        """For keep_master=False: save scales beside the model, too, with which its values come back as the
        same codes; NVFP4 and weights rounded stochastically may else be quantized by others"""

        tokens: Literal["values", "codes"] = "values"
        """Under expert parallelism: how tokens, and gradients of what experts made of them, are sent to the ranks of
        their experts. "codes" are those that the experts multiply, of mxfp8 and float8_blockwise"""

        filter_fqns: list[str] = field(default_factory=lambda: ["router.gate"])
        """Parts of the names of linears and experts ("inner_experts") that stay plain"""

    def __init__(self, config: Config):
        self.config = config
        options.check(config)
        if config.tokens == "codes" and config.weight_only:
            raise ValueError(
                'QShardConverter: tokens="codes" sends what quantized experts multiply, which weight_only leaves as '
                "values; use one of the two"
            )

    def convert(self, model_config: Module.Config) -> Module.Config:
        for kind, built_as in (
            (Linear.Config, quantized_modules.linear_class),
            (GroupedExperts.Config, quantized_modules.experts_class),
        ):
            for name, config, parent, attribute in list(model_config.traverse(kind)):
                if options.is_kept_plain(self.config, name):
                    continue
                converted = _marked(config, built_as, self.config)
                if parent is None:
                    model_config = converted
                elif isinstance(parent, list):
                    parent[attribute] = converted
                else:
                    setattr(parent, attribute, converted)
                if isinstance(parent, RoutedExperts.Config):
                    token_dispatcher.choose(parent, self.config)
        return model_config


def _marked(config, built_as, quantization):
    """A config like `config`, whose module is built as a class of ours and is to be quantized."""
    stock = vars(type(config)).get("_qshard_stock", type(config))
    values = {f.name: getattr(config, f.name) for f in fields(stock) if f.init}
    return _marked_type(stock, built_as)(**values, qshard=quantization)


@functools.cache
def _marked_type(stock: type, built_as: Callable[[type], type]) -> type:
    """A Config, with a class of its own that it builds: LoRAConverter makes subclasses of both."""

    @dataclass(kw_only=True, slots=True)
    class Config(stock):
        qshard: QShardConverter.Config

        def build(self, **kwargs):
            module = stock.build(self, **kwargs)
            module_state.of(module).awaits = self.qshard
            return module

    Config.__qualname__, Config.__module__ = stock.__qualname__, stock.__module__
    Config._qshard_stock = stock
    owner = built_as(stock._owner)
    names = {name: getattr(owner, name) for name in ("__module__", "__qualname__", "__doc__")}
    type(owner)(owner.__name__, (owner,), {**names, "Config": Config})  # sets Config._owner
    return Config


def qshard_parallelize(parallelize_fn: Callable) -> Callable:
    """A parallelize_fn for a ModelSpec: `parallelize_fn`, a model's own, and then the quantization that
    QShardConverter asked for. Quantized linears are among what selective activation checkpointing saves."""

    @functools.wraps(parallelize_fn)
    def parallelize(model: torch.nn.Module, *, parallel_dims, ac_config=None, **kwargs):
        _refuse(parallel_dims)
        model = parallelize_fn(
            model,
            parallel_dims=parallel_dims,
            ac_config=saving_quantized_linears(ac_config),
            **kwargs,
        )
        quantized_modules.quantize(model, parallel_dims)
        return model

    return parallelize


def _refuse(parallel_dims):
    if parallel_dims.pp_enabled:
        raise NotImplementedError(
            "qshard_parallelize: pipeline parallelism is not supported with torchtitan; use FSDP, HSDP, "
            "context, tensor or expert parallelism, or leave QShardConverter out"
        )
    if parallel_dims.spmd_backend == "full_dtensor":
        raise NotImplementedError(
            'qshard_parallelize: parallelism.spmd_backend="full_dtensor" is not supported: its activations '
            'are DTensors on meshes of all dimensions; use "spmd_types", the default, or "partial_dtensor"'
        )


checkpoint_beside(checkpoint.CheckpointManager)
