"""Modules whose forward is one opaque operator, for torch.compile."""

import torch
from qshard.functional import linear_under_transforms
from qshard.moves import keep_quantized

_linear = torch.ops.qshard.linear.default


class _Moves:
    """A module whose `.to()`, `.float()` and so on leave quantized weights quantized."""

    def _apply(self, fn, recurse=True):
        return super()._apply(keep_quantized(fn), recurse)


class Linear(_Moves, torch.nn.Linear):
    """nn.Linear with a quantized weight; `quantize_` turns nn.Linear into it. State-dict names are
    nn.Linear's.

    Forward, dgrad and wgrad are operators that torch.compile does not look into, so
    `layer.compile(fullgraph=True)` works. A stock nn.Linear holding a quantized weight runs the same
    kernels, in eager mode only.

    A plain weight in place of the quantized one (given by `functional_call`, computed by a
    parametrization or pruning, assigned) is quantized at each use, and its gradient goes straight
    through. `.to()`, `.float()`, `.half()`, `.to_empty()` leave the weight quantized; a dtype that
    quantized tensors do not have is an error.

    An eager backward adds the weight's gradient to an existing `.grad` within the GEMM, without a
    tensor of its own.

    weight_only: multiply by the dequantized weight; activations and gradients are not quantized.
    weight_format: of the weight, for compiled code, which cannot ask it: there the input of several
    linears (q/k/v, gate/up) is quantized once if they name the same.
    """

    weight_only = False
    weight_format = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features) in the dtype of `input`."""
        if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
            return linear_under_transforms(
                input, self.weight, self.bias, self.weight_only, self.weight_format
            )
        return _linear(
            input, self.weight, self.bias, weight_only=self.weight_only, format=self.weight_format
        )


class Embedding(_Moves, torch.nn.Embedding):
    """nn.Embedding whose weight is a quantized linear's, too; `quantize_` turns nn.Embedding into it.
    It looks up what the linear multiplies by: dequantized codes."""
