"""Modules whose forward is one opaque operator, for torch.compile."""

import torch

_linear = torch.ops.qshard.linear.default


class Linear(torch.nn.Linear):
    """nn.Linear with a quantized weight; `quantize_` turns nn.Linear into it. State-dict names are
    nn.Linear's.

    Forward, dgrad and wgrad are operators that torch.compile does not look into, so
    `layer.compile(fullgraph=True)` works. A stock nn.Linear holding a quantized weight runs the same
    kernels, in eager mode only.

    An eager backward adds the weight's gradient to an existing `.grad` within the GEMM, without a
    tensor of its own.

    weight_only: multiply by the dequantized weight; activations and gradients are not quantized.
    weight_format: of the weight, for compiled code, which cannot ask it: there the input of several
    linears (q/k/v, gate/up) is quantized once if they name the same.
    """

    weight_only = False
    weight_format = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features) in the dtype of `input`.

        Raises if the weight is not quantized (say, after load_state_dict(assign=True) of a plain
        one)."""
        return _linear(
            input, self.weight, self.bias, weight_only=self.weight_only, format=self.weight_format
        )
