"""A linear layer whose forward is one opaque operator, for torch.compile."""

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

from qshard._runtime.hooks import has_tensor_type
from qshard._runtime.library import has_key
from qshard.module_state import NamedState
from qshard.modules.calls import runs_as_steps
from qshard.modules.functional import linear_under_transforms
from qshard.modules.registrations import quantized_on_use
from qshard.nn.parts import initial
from qshard.nn.parts.arguments import refuse, refuse_arguments
from qshard.nn.parts.multiply import joined
from qshard.nn.projection import Projection
from qshard.tensor_parallel import stock

_linear = torch.ops.qshard.linear.default


def multiply(module: torch.nn.Linear, input: torch.Tensor, how) -> torch.Tensor:
    """The forward of a linear with a quantized weight. `how`: its ModuleState."""
    weight, bias = module.weight, module.bias
    if isinstance(weight, DTensor):
        if how.parallel is None or isinstance(input, DTensor):
            return stock.linear(module, input, how)
        weight, bias = how.parallel.weight(weight), how.parallel.bias(bias)
    if not torch.compiler.is_compiling():
        if torch._C._are_functorch_transforms_active():
            return linear_under_transforms(input, weight, bias, how.weight_only, how.weight_format)
        if has_tensor_type(weight) and not has_key(weight):  # fx traces with what is no tensor
            weight = quantized_on_use(module, "weight", weight)
    return _linear(input, weight, bias, weight_only=how.weight_only, format=how.weight_format)


@runs_as_steps
class Linear(Projection, NamedState, torch.nn.Linear):
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

    Made by its constructor it is plain until `quantize_`, and takes TransformerEngine's arguments,
    by keyword:
    init_method(weight): initial values, with a bias of zeros; nn.Linear's own without.
    return_bias: forward returns (output, a copy of the bias), and the bias is not added.
    parameters_split: names, or sizes by name, of parameters <name>_weight and <name>_bias that stand
        for rows of `weight` and `bias`; each is quantized by itself.
    fuse_wgrad_accumulation: the weight's gradient is added to its attribute `main_grad`, eager mode
        only; replaces what is there with is_first_microbatch=True.
    params_dtype: as dtype.
    get_rng_state_tracker, rng_tracker_name: whose fork() initial values are drawn in.
    tp_mesh, weight_mesh, tp_group: tensor parallelism, by meshes or a group, as set_device_mesh says;
        `ub_*` and the other arguments that are not mentioned raise NotImplementedError.
    parallel_mode: "column" cuts the weight's rows over the ranks, "row" its columns; None leaves it whole
        on each.
    sequence_parallel: activations outside the pair of a column and a row are cut along their first
        dimension, in equal parts.

    weight_only: multiply by the dequantized weight; activations and gradients are not quantized.
    weight_format: of the weight, for compiled code, which cannot ask it: there the input of several
        linears (q/k/v, gate/up) is quantized once if they name the same.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device=None,
        dtype: torch.dtype | None = None,
        *,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group=None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable | None = None,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split=None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
        tp_mesh=None,
        weight_mesh=None,
    ):
        refuse_arguments("Linear", locals())
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.name = in_features, out_features, name
        self.add_projection(
            bias=bias,
            return_bias=return_bias,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            parameters_split=parameters_split,
            parallel_mode=parallel_mode,
            sequence_parallel=sequence_parallel,
            init_method=init_method or initial.linear_weight,
            bias_init=None if init_method else initial.linear_bias(in_features),
            get_rng_state_tracker=get_rng_state_tracker,
            rng_tracker_name=rng_tracker_name,
            device=device,
            dtype=params_dtype or dtype,
        )
        self.parallelize(tp_group, tp_size, tp_mesh, weight_mesh)
        self.finish()

    def reset_parameters(self, defer_init: bool = False) -> None:
        """As for the other modules; where quantize_ made this of an nn.Linear, as nn.Linear."""
        if self.is_constructed:
            super().reset_parameters(defer_init)
        else:
            torch.nn.Linear.reset_parameters(self)

    def forward(
        self,
        input: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        *,
        as_parts: bool = False,
        residual: torch.Tensor | None = None,
        input_is_kept: bool = False,
    ) -> torch.Tensor:
        """(..., in_features) -> (..., out_features) in the dtype of `input`; with return_bias
        (output, bias). residual, of the output's shape: output and bias are added to it, within the GEMM
        where that can, and the sum is all that is returned. input_is_kept: something else keeps input until
        backward, so its codes are not. as_parts, made by the constructor: output is a
        tuple of what each of the weights gives."""
        if self.is_constructed:
            refuse("Linear", fp8_output=fp8_output, fp8_grad=fp8_grad)
            if residual is not None:
                return self.project_and_add(input, is_first_microbatch, residual, input_is_kept)
            parts = self.project(input, is_first_microbatch, input_is_kept)
            return self.with_bias(tuple(parts) if as_parts else joined(parts))
        if residual is not None:
            return residual + self(input)
        state = self._qshard
        if state.weight_format is None:  # after dequantize_, where FSDP2 or a parametrization made a class of this one
            return torch.nn.functional.linear(input, self.weight, self.bias)
        if state.dynamic is not None:
            return state.dynamic.linear(self, input, state)
        return multiply(self, input, state)

    def extra_repr(self) -> str:
        bias = any(getattr(self, name, None) is not None for name in self.bias_names)
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={bias}{self._qshard.shown_format()}"
