"""fuse_: patterns of plain modules, as in Hugging Face's Llama, Mistral and Qwen, as fused steps."""

import warnings
from dataclasses import dataclass

from tabulate import tabulate
from torch import nn as torch_nn

from qshard.fuse.classes import Rebuilt, has_more, mixed
from qshard.fuse.forwards import plain_class, rewrite, steps_of, takes_steps
from qshard.fuse.mlps import FusedMLP, gated_mlp
from qshard.fuse.norms import FusedNorm, rms_norm
from qshard.fuse.norms_into_linears import norm_steps
from qshard.fuse.rotary import FusedRotary, rotary_embedding, rotary_steps


@dataclass(frozen=True)
class Fused:
    """A module that `fuse_` recognised."""

    name: str
    module: str  # its class
    pattern: str


class FusedReport(list):
    """A list of Fused; prints as a table."""

    def __str__(self) -> str:
        rows = [[row.name, row.module, row.pattern] for row in self]
        return tabulate(rows, headers=["module", "class", "fused"]) if rows else "nothing recognised"


def fuse_(model: torch_nn.Module) -> FusedReport:
    """Replaces what modules of known patterns compute by fused steps, in place, and says which it
    recognised. Parameters, submodules, names of state_dicts and hooks stay; classes become subclasses
    of what they were.

    Recognised, by what they compute and by the source of forwards, not by their names:

    - RMSNorm: one weight, `x / sqrt(mean(x^2) + eps) * weight`, or `* (1 + weight)`; nn.RMSNorm with an eps
      of its own. Computed in fp32 and rounded once, where modules in Python often round twice; backward
      keeps the input alone.
    - Gated MLP: `down(f(gate(x)) * up(x))` of three nn.Linear, f one of SiLU, GELU (tanh), ReLU, sigmoid.
      The same bits; backward keeps gate(x) and up(x), and not f(gate(x)). Of SiLU, where all three are
      quantized by one recipe and none has hooks, one operator (`qshard.ops.swiglu_mlp`).
    - Rotary embedding: a module without parameters, `forward(x, cos, sin)` of (batch, heads, positions,
      channels) and (positions, channels), that turns pairs half of the channels apart. One pass, in fp32
      and rounded once. Or a module whose forward calls such a function(q, k, cos, sin) of its file, with
      cos and sin of (1, positions, channels): where these are per sequence, of some of the channels or of
      another dtype than q, and in compiled code, the function itself.
    - RMSNorm into linears: `self.reader(self.norm(x))`, in one expression or by a local variable, where only
      linears read norm(x): the reader is a linear, a gated MLP, or a child whose forward gives what it is
      given to linears of its own, once each (`self.q_proj(x)`), and asks for nothing else but `x.shape` and
      the like. Where these are quantized by one recipe, norm and linears are one step, with the same bits;
      where operators can (`qshard.ops.norm_linear`, `swiglu_mlp`), norm(x) is codes alone, which are made
      in forward and again in backward, and x is kept.

    Call it before or after `quantize_`, and before fully_shard and torch.compile. Everything else is left
    as it is: modules whose forward was replaced on the instance, that compute something else in training
    than in evaluation, and, with a warning, whose activation has hooks.

    A norm's eps is read in each forward. Of an MLP whose activation is replaced, changed or given hooks
    later, its own forward runs again. A norm before linears runs by itself while it, the reader or one of the
    linears has hooks (FSDP2's, too, of what it shards by itself) or a forward of its own, or is replaced by
    another module; where linears are cut over ranks, and weights quantized for each use or used alone; where
    norm(x) has another dtype than x, and where autocast gives linears another. Changes of what else a forward
    reads are not seen.
    """
    modules = dict(model.named_modules())
    rows, left = {name: [] for name in modules}, set()
    for name, module in modules.items():
        if "forward" in module.__dict__ or isinstance(module, Rebuilt):
            continue
        for recognise, mixin in _MODULES:
            found = recognise(module)
            if found is None:
                continue
            if has_more(found.get("function")):
                warnings.warn(
                    f"qshard.fuse_: {name or 'the model'}, a {type(module).__name__}, is left as it is: its "
                    f"{found['attribute']} has hooks, or a forward of its own, which a fused step would "
                    "not call",
                    stacklevel=2,
                )
                left.add(module)
                break
            rows[name].append(Fused(name, type(module).__name__, mixin.pattern.format(**found)))
            module._qshard_fused = found
            module.__class__ = mixed(mixin, type(module))
            break
    for name, module in modules.items():
        found = [step for recognise in _STEPS for step in recognise(module)] if takes_steps(module) else ()
        for step in found:
            rewrites = step.rewrites(module)
            if step in steps_of(module) or any(one in left for one, _ in rewrites):
                continue
            rows[name].append(Fused(name, plain_class(module).__name__, step.pattern))
            for one, steps in rewrites:
                rewrite(one, steps)
    return FusedReport(row for of_module in rows.values() for row in of_module)


# Modules as a whole, and steps of their forwards, which may read modules that are fused.
_MODULES = ((rms_norm, FusedNorm), (gated_mlp, FusedMLP), (rotary_embedding, FusedRotary))
_STEPS = (norm_steps, rotary_steps)
