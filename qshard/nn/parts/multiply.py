"""How the modules multiply: y = x @ weight^T + bias, by the codes of a weight that is quantized."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from qshard.modules.functional import linear_under_transforms
from qshard.nn.parts.autocast import activation_dtype
from qshard.nn.parts.main_grad import into_main_grad, plain_linear

_linear = torch.ops.qshard.linear.default


@dataclass(frozen=True)
class Multiply:
    """How a module's weights are used.

    weight_only, weight_format: the module's; format None means that nothing is quantized.
    into_main_grad: wgrad is added to the weight's `main_grad`.
    overwrite: wgrad replaces what `main_grad` holds.
    input_is_kept: as of `qshard.ops.linear`.
    """

    weight_only: bool = False
    weight_format: str | None = None
    into_main_grad: bool = False
    overwrite: bool = False
    input_is_kept: bool = False

    @property
    def runs_operators(self) -> bool:
        """Whether this multiplies by one of qshard's operators, with autograd of its own: not under the
        transforms of torch.func."""
        transforms = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
        return self.weight_format is not None and not transforms

    def run(self, function: Callable[..., Tensor], x: Tensor, *weights: Tensor) -> Tensor:
        """function(x, *weights), an operator, with wgrad where it belongs."""
        if self.into_main_grad:
            return into_main_grad(function, x, weights, self.overwrite)
        return function(x, *weights)

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None
    ) -> Tensor:
        """x: (..., columns); weight: (rows, columns); bias: (rows,) or None. (..., rows) in the dtype
        of activations, added to `residual`, if that is given."""
        if residual is None:
            return self._multiply(x, weight, bias)
        if residual.dtype == activation_dtype(x) and self.adds_within(x, weight, residual):
            return _linear(x, weight, bias, residual=residual, **self._options(x, weight))
        return residual + self._multiply(x, weight, bias)

    def adds_within(self, x: Tensor, *others: Tensor) -> bool:
        """Whether an operator of x and others, the weights and a residual of the output's dtype, may add
        the residual. DTensors have rules for what linears always did."""
        return self.runs_operators and not self.into_main_grad and are_plain(x, *others)

    def _multiply(self, x, weight, bias):
        format = self.weight_format
        if self.into_main_grad and format is None:
            return self.run(lambda x, weight: plain_linear(x, weight, bias), x, weight)
        if format is None:
            dtype = activation_dtype(x)
            bias = None if bias is None else bias.to(dtype)
            return F.linear(x.to(dtype), weight.to(dtype), bias)
        if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
            return linear_under_transforms(x, weight, bias, self.weight_only, format)
        options = self._options(x, weight)
        return self.run(lambda x, weight: _linear(x, weight, bias, **options), x, weight)

    def _options(self, x, weight):
        options = {"weight_only": self.weight_only, "format": self.weight_format}
        if self.input_is_kept and are_plain(x, weight):
            options["input_is_kept"] = True
        return options


def are_plain(*tensors: Tensor | None) -> bool:
    """No subclasses; None is none."""
    return all(type(tensor) in (Tensor, Parameter) for tensor in tensors if tensor is not None)


def multiply_parts(multiply: Multiply, x: Tensor, weights, biases) -> list[Tensor]:
    """By each of the weights."""
    return [multiply(x, weight, bias) for weight, bias in zip(weights, biases)]


def joined(parts: list[Tensor]) -> Tensor:
    """One after the other along the last dimension."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
