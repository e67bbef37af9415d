"""Which matrices of a checkpoint a stack of experts is: those of Hugging Face's models, one for each expert and projection.

A stack is known by the class of its module, as qshard/experts/known.py knows it. Where the class has a way of its own to split
gate from up, or keeps matrices as (in, out), what lies where is not known, and is an error."""

import sys
from dataclasses import dataclass

import torch
from torch import nn

from qshard.experts import known
from qshard.nn import GroupedExperts

# The names in torchtitan's GroupedExperts, and in qshard.nn's.
_OF_TITAN = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@dataclass(frozen=True)
class Part:
    """Rows of one expert's matrix: key is that of the stack."""

    key: str
    expert: int
    projection: str
    first: int
    rows: int

    @property
    def name(self):
        """In the state_dict of a model whose experts are modules."""
        return f"{self.key.rpartition('.')[0]}.{self.expert}.{self.projection}.weight".lstrip(".")

    def matrix(self, local: torch.Tensor, box) -> torch.Tensor:
        """The expert's matrix in a rank's stack, whose box of experts, rows and columns this is; no matrix where another rank
        has it."""
        (begin, count), *_ = box
        return local[self.expert - begin] if begin <= self.expert < begin + count else local[:0]

    def rows_of(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.narrow(0, self.first, self.rows) if matrix.dim() == 2 else matrix

    def box(self, box):
        """The rank's part of this matrix: all or nothing."""
        (begin, count), _, (_, columns) = box
        is_here = begin <= self.expert < begin + count
        return ((0, self.rows), (0, columns)) if is_here else ((0, 0), (0, 0))


def parts_of(module: nn.Module, attribute: str, key: str, stack: torch.Tensor) -> list[Part]:
    """The matrices of a stack. Raises NotImplementedError for a stack of a module that is not known."""
    experts, rows, _ = stack.shape
    if known.is_of_transformers(module):
        projections = _of_transformers(module, attribute, key)
    elif isinstance(module, GroupedExperts) or known.is_of_torchtitan(module):
        projections = [_OF_TITAN[attribute]] if attribute in _OF_TITAN else []
    else:
        projections = []
    if not projections:
        raise NotImplementedError(
            f"{key} is a quantized stack of shape {tuple(stack.shape)} in a {type(module).__name__}, whose experts' names in "
            "checkpoints are not known; leave it plain by quantize_'s parameter_fn"
        )
    count = rows // len(projections)
    return [
        Part(key, expert, projection, i * count, count)
        for expert in range(experts)
        for i, projection in enumerate(projections)
    ]


def _of_transformers(module, attribute, key):
    moe = sys.modules["transformers.integrations.moe"]
    if getattr(module, "is_transposed", False):
        raise NotImplementedError(
            f"{key} has matrices (in, out) in a {type(module).__name__}, whose scale blocks are not those of (out, in); leave "
            "it plain by quantize_'s parameter_fn"
        )
    if attribute == "gate_up_proj":
        if type(module)._apply_gate is not moe._default_apply_gate:
            raise NotImplementedError(
                f"{key} is split by {type(module).__name__}._apply_gate, and not into halves of gate and up as by transformers' "
                "own; leave it plain by quantize_'s parameter_fn"
            )
        return ["gate_proj", "up_proj"]
    return [attribute] if attribute in ("up_proj", "down_proj") else []
