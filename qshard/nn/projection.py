"""What modules with the parameters of one linear share: Linear and LayerNormLinear."""

from collections.abc import Callable

import torch
from torch.nn import init

from qshard.nn.base import Initialized, returned
from qshard.nn.parts.arguments import (
    PARALLEL_MODES,
    check_choice,
    rng_fork,
    split_sizes,
)
from qshard.nn.parts.multiply import Multiply, joined, multiply_parts
from qshard.nn.parts.parallel import DeviceMeshes
from qshard.tensor_parallel.local import local_part


class Projection(Initialized, DeviceMeshes):
    """Parameters `weight` and `bias`, or parts of them with names of their own."""

    weight_names = ("weight",)
    bias_names = ("bias",)
    is_constructed = False

    def add_projection(
        self,
        *,
        bias: bool,
        return_bias: bool,
        fuse_wgrad_accumulation: bool,
        parameters_split,
        parallel_mode: str | None,
        sequence_parallel: bool,
        init_method: Callable,
        bias_init: Callable | None,
        get_rng_state_tracker: Callable | None,
        rng_tracker_name: str | None = None,
        device=None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Parameters of (out_features, in_features), and what forward needs to know."""
        module = type(self).__name__
        check_choice(module, "parallel_mode", parallel_mode, PARALLEL_MODES)
        sizes = split_sizes(module, parameters_split, self.out_features)
        self.is_constructed = True
        self.parallel_mode, self.sequence_parallel = parallel_mode, sequence_parallel
        self.use_bias, self.return_bias = bias, return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.weight_names = tuple(f"{part}weight" for part in sizes)
        self.bias_names = tuple(f"{part}bias" for part in sizes)
        options = {"device": device, "dtype": dtype}
        fork = rng_fork(get_rng_state_tracker, rng_tracker_name)
        for name, rows in zip(self.weight_names, sizes.values()):
            self.add_parameter(name, (rows, self.in_features), init_method, fork=fork, **options)
        for name, rows in zip(self.bias_names, sizes.values()):
            if bias:
                self.add_parameter(name, (rows,), bias_init or init.zeros_, **options)
            else:
                self.register_parameter(name, None)

    def parallel_modes(self) -> dict[str, str | None]:
        return dict.fromkeys((*self.weight_names, *self.bias_names), self.parallel_mode)

    def multiply(self, is_first_microbatch: bool | None, input_is_kept: bool = False) -> Multiply:
        return Multiply(
            self._qshard.weight_only,
            self._qshard.weight_format,
            self.fuse_wgrad_accumulation,
            overwrite=is_first_microbatch is True,
            input_is_kept=input_is_kept,
        )

    def parameters_to_multiply(self) -> tuple[list, list]:
        """Weights, and the biases that the linear adds; of DTensors the local parts."""
        adds = self.use_bias and not self.return_bias
        weights = [getattr(self, name) for name in self.weight_names]
        biases = [getattr(self, name) if adds else None for name in self.bias_names]
        parallel = self._qshard.parallel
        if parallel is not None:
            weights, biases = map(parallel.weight, weights), map(parallel.bias, biases)
        return list(weights), list(biases)

    def project(
        self, x: torch.Tensor, is_first_microbatch: bool | None, input_is_kept: bool = False
    ) -> list[torch.Tensor]:
        """(..., in_features) -> (..., rows) of each weight."""
        multiply, parallel = self.multiply(is_first_microbatch, input_is_kept), self._qshard.parallel
        if parallel is None:
            return multiply_parts(multiply, x, *self.parameters_to_multiply())
        parallel.check_output(x)
        x = parallel.enter(x, self.message_format, [getattr(self, name) for name in self.weight_names])
        parts = multiply_parts(multiply, x, *self.parameters_to_multiply())
        if parallel.mode == "row":
            parts = [joined(parts)]  # one collective
        return [parallel.leave(part, self.message_format) for part in parts]

    def project_and_add(
        self,
        x: torch.Tensor,
        is_first_microbatch: bool | None,
        residual: torch.Tensor,
        input_is_kept: bool = False,
    ) -> torch.Tensor:
        """residual + (..., out_features), bias included."""
        is_one = self._qshard.parallel is None and len(self.weight_names) == 1
        if is_one and not (self.use_bias and self.return_bias):
            (weight,), (bias,) = self.parameters_to_multiply()
            multiply = self.multiply(is_first_microbatch, input_is_kept)
            return multiply(x, weight, bias, residual)
        output = self.with_bias(joined(self.project(x, is_first_microbatch, input_is_kept)))
        if self.return_bias:
            output = output[0] + output[1] if self.use_bias else output[0]
        return residual + output

    def with_bias(self, output, *more: torch.Tensor):
        """output, or (output, bias) with return_bias, and what else is returned; a bias that the
        module does not have is an empty tensor."""
        if self.return_bias:
            like = output[0] if isinstance(output, tuple) else output
            parallel = self._qshard.parallel
            is_summed = parallel is not None and parallel.cuts_output_tokens
            biases = [
                returned(local_part(getattr(self, name), is_summed), like.dtype)
                for name in self.bias_names
                if self.use_bias
            ]
            bias = torch.cat(biases) if len(biases) > 1 else (biases or [like.new_empty(0)])[0]
            more = (bias, *more)
        return (output, *more) if more else output
