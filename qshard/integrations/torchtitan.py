"""A model converter for torchtitan, under the name quantize.qshard:

    [job]
    custom_config_module = "qshard.integrations.torchtitan"    # imports this file, adds the section below
    [model]
    converters = ["quantize.qshard"]
    [quantize.qshard]
    recipe = "float8_blockwise"
"""

from dataclasses import dataclass, field
from typing import Literal

import qshard
import torch
import torchtitan.config
from qshard import module_state
from qshard.choosing import warn_of_what_is_left

try:
    from torchtitan.config import job_config as stock
except ImportError:
    raise ImportError(
        "qshard.integrations.torchtitan: this torchtitan has no torchtitan.config.job_config; the converter is "
        "for torchtitan 0.2. With 0.3 call qshard.quantize_(model, recipe, persistent_state=False) in a "
        "parallelize_fn of yours, after torchtitan's own"
    ) from None
from torchtitan.components import checkpoint
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.protocols.model_converter import register_model_converter

_RECIPES = {
    "float8_tensorwise": qshard.Float8CurrentScaling,
    "float8_delayed": qshard.DelayedScaling,
    "float8_blockwise": qshard.Float8BlockScaling,
    "mxfp8": qshard.MXFP8BlockScaling,
    "nvfp4": qshard.NVFP4BlockScaling,
}


@dataclass
class QShard:
    recipe: Literal["float8_tensorwise", "float8_delayed", "float8_blockwise", "mxfp8", "nvfp4"] = (
        "float8_blockwise"
    )
    """Format of the weights, and with it how activations and gradients are quantized"""

    amax_history_len: int = 1024
    """For float8_delayed: optimizer steps that are remembered"""

    keep_master: bool = True
    """Keep each weight's full-precision value beside its codes"""

    weight_only: bool = False
    """Leave activations and gradients in their dtype"""

    stochastic_rounding: bool = False
    """For keep_master = false"""

    checkpoint_scales: bool = False
    """For keep_master = false: save scales beside the model, too, with which its values come back as the
    same codes; NVFP4 and weights rounded stochastically may else be quantized by others"""

    filter_fqns: list[str] = field(default_factory=lambda: ["router.gate"])
    """Parts of the names of nn.Linear modules that stay plain"""


@dataclass
class Quantize(stock.Quantize):
    qshard: QShard = field(default_factory=QShard)
    """Weights of nn.Linear as quantized parameters"""


@dataclass
class JobConfig:
    """What torchtitan merges into its own JobConfig, for job.custom_config_module."""

    quantize: Quantize = field(default_factory=Quantize)


class QShardConverter(QuantizationConverter):
    """Quantizes the weights of nn.Linear modules while the model is on the meta device, before
    torchtitan shards and initializes it. Experts, which torchtitan keeps as 3-D parameters of modules
    of its own, stay plain, and a warning names them. Amax histories and rounding counts are
    checkpointed beside the model, as
    "qshard", so that Hugging Face output and state-dict adapters see the model's own names.

    Raises NotImplementedError under tensor and pipeline parallelism.
    """

    def __init__(self, job_config: torchtitan.config.JobConfig, parallel_dims):
        super().__init__(job_config, parallel_dims)
        for is_enabled, what in [
            (parallel_dims.tp_enabled, "tensor"), (parallel_dims.pp_enabled, "pipeline"),
        ]:
            if is_enabled:
                raise NotImplementedError(
                    f"quantize.qshard: {what} parallelism is not supported with torchtitan; use "
                    "FSDP, HSDP or context parallelism, or another converter"
                )
        self.config = getattr(job_config.quantize, "qshard", None) or QShard()
        if self.config.recipe not in _RECIPES:
            raise ValueError(
                f"quantize.qshard: recipe must be one of {', '.join(_RECIPES)}, not "
                f"{self.config.recipe!r}"
            )

    def convert(self, model: torch.nn.Module) -> None:
        config = self.config
        is_delayed = config.recipe == "float8_delayed"
        options = dict(amax_history_len=config.amax_history_len) if is_delayed else {}
        qshard.quantize_(
            model,
            _RECIPES[config.recipe](**options),
            keep_master=config.keep_master,
            weight_only=config.weight_only,
            stochastic_rounding=config.stochastic_rounding,
            persistent_state=False,
            filter_fn=lambda _, name: not any(part in name for part in config.filter_fqns),
        )
        module_state.of(model).saves_scales = config.checkpoint_scales
        warn_of_what_is_left(model, "torchtitan's other converters may have a format for them")

    def post_optimizer_hook(self, model) -> None:
        """Nothing: weights are requantized after every optimizer step by themselves."""


class _LoadedLast(qshard.QuantizationState):
    """CheckpointManager gives the model its values once more after all states have theirs."""

    given = None

    def load_state_dict(self, state_dict):
        self.given = state_dict

    def finish(self):
        if self.given is not None:
            super().load_state_dict(self.given)
            self.given = None


def _checkpoint_beside(manager_type):
    """Converters are not asked what to checkpoint; CheckpointManager saves and loads all `states`."""
    stock_init, stock_load = manager_type.__init__, manager_type.load

    def __init__(self, *args, **kwargs):
        stock_init(self, *args, **kwargs)
        parts = self.states[checkpoint.MODEL].model
        states = map(module_state.find, parts)
        scales = any(state is not None and state.saves_scales for state in states)
        state = _LoadedLast(*parts, scales=scales)
        if state.state_dict():
            self.states["qshard"] = state

    def load(self, *args, **kwargs):
        is_loaded = stock_load(self, *args, **kwargs)
        if "qshard" in self.states:
            self.states["qshard"].finish()
        return is_loaded

    manager_type.__init__, manager_type.load = __init__, load


_checkpoint_beside(checkpoint.CheckpointManager)
register_model_converter(QShardConverter, "quantize.qshard")
