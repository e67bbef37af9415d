"""fuse_: modules of known classes, as those of Hugging Face's Llama, as fused steps."""

from torch import nn as torch_nn

from qshard.fuse.classes import fused_class, is_fused
from qshard.fuse.mlps import GatedMLP, PackedMLP
from qshard.fuse.norms import Norm
from qshard.fuse.part import Reason
from qshard.fuse.registry import find, known_base, register
from qshard.fuse.report import Fused, FusedReport, Left, known_in_files_of, warn_of
from qshard.fuse.rotary import Rotary, RotaryPair
from qshard.nn.parts.known_activations import know_activations

__all__ = [
    "Fused",
    "FusedReport",
    "GatedMLP",
    "Left",
    "Norm",
    "PackedMLP",
    "Rotary",
    "RotaryPair",
    "fuse_",
    "register",
]


def fuse_(model: torch_nn.Module) -> FusedReport:
    """Replaces what modules of known classes compute by fused steps, in place, and says which it
    replaced. Parameters, submodules, names of state_dicts, signatures and hooks stay; classes
    become subclasses of what they were, and are copied and pickled as these.

    A module is known by its class, exactly, and never by its name or by what it computes: torch's
    RMSNorm and LayerNorm; norms, MLPs and attentions of transformers' Llama, Mistral, Qwen2,
    Qwen3, Gemma and Phi, its experts in whatever model; attentions, gated MLPs and rotary modules
    of torchtitan; both in the versions that docs/fused-modules.md has; and what
    `qshard.fuse.register` was told. Activations are known by their class or function.

    - Norms are computed in fp32 and rounded once, where modules in Python often round twice;
      backward keeps the input alone.
    - Gated MLPs `down(f(gate(x)) * up(x))`, f one of SiLU, GELU (tanh), ReLU and sigmoid, give the
      same bits; backward keeps gate(x) and up(x), and not f(gate(x)). For all but sigmoid, where all
      three linears are quantized by one recipe and none has hooks, they are one operator
      (`qshard.ops.swiglu_mlp`).
    - Experts of transformers whose gate is SiLU are one operator (`qshard.ops.swiglu_experts`) where
      their stacks are quantized, whatever experts_implementation says; else they are as they were.
    - Attentions turn queries and keys by one pass each, in fp32 and rounded once. In compiled code
      they are as they were, but for tables of complex numbers, for which Inductor has no code.
    - Rotary embeddings that are modules are one such pass, of queries and keys each.

    Call it before or after `quantize_`, and before fully_shard and torch.compile. The report's
    `left` lists modules of known classes, and of subclasses of these, that stay as they are, and
    why. A warning says where that may surprise: an activation with hooks, a class or function that
    something else has replaced, a version of a package whose code is not known, a known class that
    its file no longer has.

    The plain forward runs in calls whose arguments or values a step does not take, and while an
    activation has hooks or is not a known one. eps and the activation are read in each call."""
    know_activations()
    rows, left = [], []
    for name, module in list(model.named_modules()):
        if is_fused(module):
            continue
        cls = type(module)
        part, reason = find(cls)
        if part is not None:
            reason = _own_forward(module) or part.reason(module)
        if part is not None and reason is None:
            rows.append(Fused(name, cls.__name__, part.describe(module)))
            module.__class__ = fused_class(cls, part)
            continue
        if reason is None and (base := known_base(cls)) is not None:
            reason = Reason(f"it is a subclass of {base.__name__}, and not registered itself")
        if reason is not None:
            left.append((Left(name, cls.__name__, reason.text), reason.warns))
    warn_of(left, model)
    return FusedReport(rows, (row for row, _ in left), known_in_files_of(model))


def _own_forward(module):
    is_replaced = "forward" in module.__dict__
    return Reason("its forward was replaced on the module") if is_replaced else None
