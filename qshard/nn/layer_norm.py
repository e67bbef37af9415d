"""LayerNorm with TransformerEngine's arguments."""

import warnings
from collections.abc import Iterable

import torch
from torch.nn import init

from qshard.nn.base import Initialized
from qshard.nn.parts.autocast import autocast_dtype
from qshard.nn.parts.initial import gamma_init
from qshard.nn.parts.norms import normalize
from qshard.nn.parts.parallel import DeviceMeshes


class Norm(Initialized, DeviceMeshes, torch.nn.Module):
    """What LayerNorm and RMSNorm share."""

    normalization: str
    has_bias: bool
    is_of_heads = False  # of queries or keys, whose heads tensor parallelism cuts

    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device=None,
        dtype: torch.dtype | None = None,
        sm_margin: int | dict[str, int] = 0,
    ):
        super().__init__()
        module = self.normalization
        if (normalized_shape is None) == (hidden_size is None):
            raise ValueError(f"qshard.nn.{module}: expected normalized_shape, or else hidden_size")
        if params_dtype is not None and dtype is not None:
            raise ValueError(f"qshard.nn.{module}: params_dtype and dtype are the same; give one")
        if hidden_size is not None:
            warnings.warn(
                f"qshard.nn.{module}: hidden_size is now normalized_shape", DeprecationWarning, 2
            )
            normalized_shape = hidden_size
        one = not isinstance(normalized_shape, Iterable)
        self.normalized_shape = (normalized_shape,) if one else tuple(normalized_shape)
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        options = {"device": device, "dtype": params_dtype or dtype}
        self.add_parameter(
            "weight", self.normalized_shape, gamma_init(zero_centered_gamma), **options
        )
        if self.has_bias:
            self.add_parameter("bias", self.normalized_shape, init.zeros_, **options)
        self.finish()

    @property
    def is_of_own_tokens(self) -> bool:
        return bool(self.sequence_parallel) or self.is_of_heads

    def reset_parameters(self, defer_init: bool = False) -> None:
        super().reset_parameters(defer_init)
        if self.sequence_parallel is not None:
            for parameter in self.parameters(recurse=False):
                parameter.sequence_parallel = self.sequence_parallel

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., *normalized_shape), the same shape out, in the weight's dtype or that of autocast."""
        shape = self.normalized_shape
        if tuple(input.shape[-len(shape) :]) != shape:
            raise ValueError(
                f"qshard.nn.{self.normalization}: input of shape {tuple(input.shape)} does not end "
                f"in normalized_shape {shape}"
            )
        weight, bias = self.weight, self.bias if self.has_bias else None
        if self._qshard.parallel is not None:
            weight, bias = self._qshard.parallel.local(weight, bias)
        # As TransformerEngine's: the result is in the parameters' dtype.
        dtype = autocast_dtype(input) or weight.dtype
        return normalize(
            input,
            self.normalization,
            weight,
            bias,
            self.eps,
            self.zero_centered_gamma,
            dtype,
        )

    def extra_repr(self) -> str:
        return (
            f"{self.normalized_shape}, eps={self.eps}, "
            f"zero_centered_gamma={self.zero_centered_gamma}"
        )


class LayerNorm(Norm):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimensions; with zero_centered_gamma
    times 1 + weight. Computed in fp32 and rounded once to the dtype of the parameters, or autocast's.

    normalized_shape: int, or sizes of the last dimensions. hidden_size: its deprecated name.
    dtype, params_dtype: of the parameters; torch's default without.
    sequence_parallel: the parameters' attribute of that name, for Megatron-LM.
    sm_margin: changes nothing here.
    """

    normalization = "LayerNorm"
    has_bias = True
