"""Gated experts of transformers, in whatever file their class is: it is known by its forward and its gate."""

import functools
from dataclasses import dataclass
from typing import ClassVar

from qshard.experts import torchtitan, transformers
from qshard.fuse.part import Part, Reason, operands_of
from qshard.modules.packages import TRANSFORMERS
from qshard.nn.parts.known_activations import gated_name, has_more


@dataclass(frozen=True)
class GatedExperts(Part):
    """Modules to which transformers' use_experts_implementation gave their forward and its own gate: of each expert
    `down_proj(silu(gate) * up)`, gate and up the halves of `gate_up_proj`. Fused they are one operator
    (`qshard.ops.swiglu_experts`), whatever experts_implementation says, once both stacks are quantized."""

    operands: ClassVar[int] = 3

    def reason(self, module):
        if not TRANSFORMERS.is_known():
            return Reason(TRANSFORMERS.why_unknown(), warns=True)
        if has_more(module.act_fn):
            text = "its act_fn has hooks, or a forward of its own, which a fused step would not call"
            return Reason(text, warns=True)
        name = gated_name(module.act_fn)
        if name != "swiglu":
            return Reason(f"its activation is {name or module.act_fn}, and experts are fused for SiLU")
        return None if transformers.is_swiglu(module) else Reason("its experts have more steps than a SiLU MLP")

    def describe(self, module):
        return "down_proj(swiglu of gate_up_proj) of each expert"

    def run(self, module, hidden_states, top_k_index, top_k_weights):
        if not transformers.is_one_operator(module):
            return None
        return transformers.experts_forward(module, hidden_states, top_k_index, top_k_weights)

    def forward(self, cls):
        plain, names, run = cls.forward, self.names(cls), self.run

        @functools.wraps(plain)
        def forward(self, *args, **kwargs):
            operands = operands_of(names, args, kwargs)
            y = None if operands is None else run(self, *operands)
            return plain(self, *args, **kwargs) if y is None else y

        return forward


_EXPERTS = GatedExperts()


def experts_part(cls: type) -> tuple[Part | None, Reason | None]:
    """What is known of a class of experts; (None, None) of any other class."""
    if torchtitan.runs_as_experts(cls):
        return None, Reason("quantize_ makes one operator of its experts, without fuse_")
    is_known = transformers.runs_as_experts(cls) and transformers.has_halves(cls)
    return (_EXPERTS if is_known else None), None
