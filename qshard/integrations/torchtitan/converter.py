"""A model converter for torchtitan 0.2, under the name quantize.qshard."""

import collections
import functools
from dataclasses import dataclass, field
from typing import Literal

import qshard
import torch
import torchtitan.config
from qshard import module_state
from qshard.activation_checkpointing import PRODUCTS
from qshard.integrations.torchtitan import expert_parallel, options
from qshard.integrations.torchtitan.checkpoints import checkpoint_beside
from qshard.model.choosing import warn_of_what_is_left

from torchtitan.components import checkpoint
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config import job_config as stock
from torchtitan.distributed import activation_checkpoint
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.tools.logging import logger


@dataclass
class QShard:
    recipe: Literal[options.NAMES] = "float8_blockwise"
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

    experts: bool = False
    """Stacks of experts (GroupedExperts), too"""

    tokens: Literal["values", "codes"] = "values"
    """With experts = true, under expert parallelism: how tokens, and gradients of what experts made of them, are sent
    to the ranks of their experts. "codes" are those that the experts multiply, of mxfp8 and float8_blockwise"""

    fuse: bool = False
    """Norms, gated MLPs and rotary embeddings as fused steps (qshard.fuse_)"""

    filter_fqns: list[str] = field(default_factory=lambda: ["router.gate"])
    """Parts of the names of nn.Linear modules and GroupedExperts that stay plain"""


@dataclass
class Quantize(stock.Quantize):
    qshard: QShard = field(default_factory=QShard)
    """Weights of nn.Linear, and of experts, as quantized parameters"""


@dataclass
class JobConfig:
    """What torchtitan merges into its own JobConfig, for job.custom_config_module."""

    quantize: Quantize = field(default_factory=Quantize)


class QShardConverter(QuantizationConverter):
    """Quantizes the weights of nn.Linear modules while the model is on the meta device, before
    torchtitan shards and initializes it, and with `experts = true` the stacks of GroupedExperts, which
    ExpertParallel then hands out in whole matrices. Without, a warning names them. Amax histories and rounding counts are
    checkpointed beside the model, as "qshard", so that Hugging Face output and state-dict adapters see
    the model's own names.

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
                    "FSDP, HSDP, context or expert parallelism, or another converter"
                )
        self.config = getattr(job_config.quantize, "qshard", None) or QShard()
        options.check(self.config)
        if self.config.tokens == "codes" and (self.config.weight_only or not self.config.experts):
            raise ValueError(
                'quantize.qshard: tokens = "codes" sends what quantized experts multiply; set experts = true, without '
                "weight_only, or leave tokens out"
            )

    def convert(self, model: torch.nn.Module) -> None:
        config = self.config
        qshard.quantize_(
            model,
            options.recipe_of(config),
            filter_fn=self._is_chosen,
            parameter_fn=lambda *_: False,  # what stays plain is said below
            **options.arguments(config),
        )
        module_state.of(model).saves_scales = config.checkpoint_scales
        if config.tokens == "codes":
            expert_parallel.send_tokens_in_codes(model)
        hint = "torchtitan's other converters may have a format for them"
        if not config.experts:
            hint = f"quantize.qshard.experts = true takes experts; {hint}"
        warn_of_what_is_left(model, hint)
        if config.fuse:
            fused = collections.Counter(row.module for row in qshard.fuse_(model))
            logger.info(f"quantize.qshard.fuse: {dict(fused)} are fused steps")

    def _is_chosen(self, module, name):
        is_linear = isinstance(module, torch.nn.Linear)
        return (is_linear or self.config.experts) and not options.is_kept_plain(self.config, name)

    def post_optimizer_hook(self, model) -> None:
        """Nothing: weights are requantized after every optimizer step by themselves."""


def _save_quantized_linears(stock_apply):
    """Each model has its own set of operators that selective_ac_option = "op" saves, and hands it to the one function
    that makes a policy of it (torchtitan/distributed/activation_checkpoint.py: _apply_op_sac), which computes every
    second aten.mm again. Quantized linears are saved, all of them, as with torchtitan 0.3."""

    @functools.wraps(stock_apply)
    def apply_op_sac(module, ac_config, *, op_sac_save_list, **kwargs):
        return stock_apply(module, ac_config, op_sac_save_list=op_sac_save_list | PRODUCTS, **kwargs)

    return apply_op_sac


activation_checkpoint._apply_op_sac = _save_quantized_linears(activation_checkpoint._apply_op_sac)
checkpoint_beside(checkpoint.CheckpointManager)
register_model_converter(QShardConverter, "quantize.qshard")
