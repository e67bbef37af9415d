"""Which matrices of a checkpoint a stack of experts is: those of Hugging Face's models, one for each expert and projection.

A stack is known by the class of its module, as qshard/experts/known.py knows it. Where the class has a way of its own to split
gate from up, what lies where is not known, and is an error.

Files have matrices (out, in). Those of a stack (in, out) are transposed, which leaves codes and scales the same numbers where
blocks are square. Other blocks are an error, and so are such experts that no reader takes in codes. vLLM (models/llama4.py at
0121c95e), SGLang (srt/models/mllama4.py of 0.5.10) and transformers, by its SequentialLlama4TextExperts and compressed-tensors,
take Llama 4's by these names. transformers' FP8 experts have no biases, as GPT-OSS has, and no sizes of Aria. vLLM takes GPT-OSS
in MXFP4 or Quark's layout, and Aria plain."""

import sys
from dataclasses import dataclass

import torch
from torch import nn

from qshard._runtime.hooks import local_of
from qshard.experts import known
from qshard.formats import info_of
from qshard.nn import GroupedExperts

# The names in torchtitan's GroupedExperts, and in qshard.nn's.
_OF_TITAN = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@dataclass(frozen=True)
class Part:
    """A matrix (out, in) of files: rows, from `first` on, of one expert's matrix, or of its transpose. key: that of the stack."""

    key: str
    expert: int
    projection: str
    first: int
    rows: int
    columns: int
    is_transposed: bool = False

    @property
    def name(self):
        """In the state_dict of a model whose experts are modules."""
        return f"{self.key.rpartition('.')[0]}.{self.expert}.{self.projection}.weight".lstrip(".")

    def matrix(self, local: torch.Tensor, box) -> torch.Tensor:
        """The expert's matrix in a rank's stack, whose box of experts, rows and columns this is; no matrix where another rank
        has it."""
        (begin, count), *_ = box
        return local[self.expert - begin] if begin <= self.expert < begin + count else local[:0]

    def rows_of(self, matrix: torch.Tensor, box) -> torch.Tensor:
        """The rows of this part of a rank's part (out, in) of an expert's matrix, as it lies in the stack's `box`. A stack
        without matrices stays as it is."""
        if matrix.dim() != 2:
            return matrix
        (first, count), (start, _) = self._rows(box)
        return matrix.narrow(0, self.first + first - start if count else 0, count)

    def box(self, box):
        """What this matrix has of a rank's box of the stack."""
        (begin, experts), *_ = box
        rows, _ = self._rows(box)
        columns = box[1] if self.is_transposed else box[2]
        is_here = begin <= self.expert < begin + experts and rows[1] > 0 and columns[1] > 0
        return (rows, columns) if is_here else ((0, 0), (0, 0))

    def _rows(self, box):
        """Those of this part in the box, as (first, count) of it, and all rows of the box, as those of the matrix."""
        start, held = of_matrix = box[2] if self.is_transposed else box[1]
        first, end = max(self.first, start), min(self.first + self.rows, start + held)
        return (max(first - self.first, 0), max(end - first, 0)), of_matrix


def parts_of(module: nn.Module, attribute: str, key: str, stack: torch.Tensor) -> list[Part]:
    """The matrices of a stack. Raises NotImplementedError for a stack of a module that is not known."""
    experts, *sizes = stack.shape
    is_transposed = known.is_of_llama4(module)
    if is_transposed:
        projections = _halves(attribute)
        _check_square(module, key, torch.ops.qshard.format(local_of(stack)))
    elif known.is_of_transformers(module):
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
    rows, columns = reversed(sizes) if is_transposed else sizes
    count = rows // len(projections)
    return [
        Part(key, expert, projection, i * count, count, columns, is_transposed)
        for expert in range(experts)
        for i, projection in enumerate(projections)
    ]


def _halves(attribute):
    if attribute == "gate_up_proj":
        return ["gate_proj", "up_proj"]
    return [attribute] if attribute in ("up_proj", "down_proj") else []


def _check_square(module, key, format):
    scale = info_of(format).scale
    if scale.block_rows != scale.block_cols:
        raise NotImplementedError(
            f"{key} has matrices (in, out) in a {type(module).__name__}, and {format!r} has scales along their rows, which are "
            "none of the matrices (out, in) that readers take; quantize it by a recipe of square blocks or of one scale, as "
            "Float8BlockScaling() or Float8CurrentScaling(), or leave it plain by quantize_'s parameter_fn"
        )


def transposed_codes(codes: torch.Tensor, format: str, columns: int) -> torch.Tensor:
    """The codes of the transpose of a matrix, or of each of a stack, in a format of square blocks. columns: of the matrix, whose
    rows are an even number where two codes lie in a byte."""
    of_bytes = codes.view(torch.uint8).mT
    if info_of(format).code_bits == 4:  # two in a byte, the even column in the low bits
        nibbles = torch.stack([of_bytes & 15, of_bytes >> 4], -2).flatten(-3, -2)[..., :columns, :]
        of_bytes = nibbles[..., ::2] | nibbles[..., 1::2] << 4
    return of_bytes.view(codes.dtype)


def transposed_scales(scale: torch.Tensor, format: str, columns: int) -> torch.Tensor:
    """The scales that those codes have."""
    level = info_of(format).scale
    if level.place != "rows":
        return scale.mT
    of_blocks = scale.view(torch.uint8)[..., :: level.block_rows, :].mT
    return of_blocks.repeat_interleave(level.block_rows, -2)[..., :columns, :].view(scale.dtype)


def _of_transformers(module, attribute, key):
    moe = sys.modules["transformers.integrations.moe"]
    if getattr(module, "is_transposed", False):
        raise NotImplementedError(
            f"{key} has matrices (in, out) in a {type(module).__name__}, whose codes no reader takes: of such experts readers "
            "know those of Llama 4 alone; write values, by qshard.dequantize_ and save_pretrained, or leave it plain by "
            "quantize_'s parameter_fn"
        )
    if attribute == "gate_up_proj" and type(module)._apply_gate is not moe._default_apply_gate:
        raise NotImplementedError(
            f"{key} is split by {type(module).__name__}._apply_gate, and not into halves of gate and up as by transformers' "
            "own; leave it plain by quantize_'s parameter_fn"
        )
    return _halves(attribute)
