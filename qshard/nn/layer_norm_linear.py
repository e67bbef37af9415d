"""A normalization and the linear it feeds."""

import functools
from collections.abc import Callable

import torch
from torch.nn import init

from qshard.modules.calls import runs_as_steps
from qshard.nn.parts import initial
from qshard.nn.parts.arguments import NORMALIZATIONS, check_choice, refuse, refuse_arguments
from qshard.nn.parts.fused import norm_linear
from qshard.nn.parts.multiply import joined
from qshard.nn.projection import Projection


@runs_as_steps
class LayerNormLinear(Projection, torch.nn.Module):
    """linear(norm(x)). Parameters: layer_norm_weight, layer_norm_bias (not with RMSNorm), weight, bias;
    `quantize_` quantizes weight.

    in_features, out_features: sizes of the last dimension of input and output.
    eps, normalization ("LayerNorm" or "RMSNorm"), zero_centered_gamma: of the normalization, computed
        in fp32, rounded once to the dtype of activations.
    bias: have one. return_bias: return a copy of it, instead of adding it.
    return_layernorm_output: return norm(x), too.
    parameters_split: names, or sizes by name, of parameters <name>_weight and <name>_bias in place of
        weight and bias; each is quantized by itself.
    init_method(weight): initial values; normal with a deviation of 0.023 without.
    fuse_wgrad_accumulation: the weight's gradient is added to its attribute `main_grad`, eager mode
        only; replaces what is there with is_first_microbatch=True.
    params_dtype: of the parameters; torch's default without.
    get_rng_state_tracker: whose fork() initial values are drawn in.
    tp_mesh, weight_mesh, tp_group, parallel_mode, sequence_parallel: as of Linear, but "row".
    return_layernorm_output_gathered: with sequence_parallel, of the tokens of all ranks.
    ub_*, delay_wgrad_compute and symmetric_ar_type raise NotImplementedError.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group=None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split=None,
        zero_centered_gamma: bool = False,
        device=None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
        tp_mesh=None,
        weight_mesh=None,
    ):
        refuse_arguments("LayerNormLinear", locals())
        check_choice("LayerNormLinear", "normalization", normalization, NORMALIZATIONS)
        if parallel_mode == "row":
            raise NotImplementedError(
                "qshard.nn.LayerNormLinear: parallel_mode='row' is not supported; a normalization "
                "needs whole rows"
            )
        super().__init__()
        self.in_features, self.out_features, self.name = in_features, out_features, name
        self.eps, self.normalization = eps, normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        options = {"device": device, "dtype": params_dtype}
        gamma = initial.gamma_init(zero_centered_gamma)
        self.add_parameter("layer_norm_weight", (in_features,), gamma, **options)
        if normalization == "LayerNorm":
            self.add_parameter("layer_norm_bias", (in_features,), init.zeros_, **options)
        else:
            self.register_parameter("layer_norm_bias", None)
        self.add_projection(
            bias=bias,
            return_bias=return_bias,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            parameters_split=parameters_split,
            parallel_mode=parallel_mode,
            sequence_parallel=sequence_parallel,
            init_method=init_method or initial.default_init_method,
            bias_init=None,
            get_rng_state_tracker=get_rng_state_tracker,
            **options,
        )
        self.parallelize(tp_group, tp_size, tp_mesh, weight_mesh)
        self.finish()

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        *,
        as_parts: bool = False,
        with_input: bool = False,
    ):
        """(..., in_features) -> (..., out_features), or a tuple of it, the bias (return_bias) and
        (..., in_features) norm(inp) (return_layernorm_output), in the dtype of `inp` or autocast's.
        as_parts: a tuple of what each of the weights gives, in place of the first. with_input: and, last,
        inp, to add something to: that sum's gradient is added to the norm's as this is written."""
        refuse("LayerNormLinear", fp8_output=fp8_output, fp8_grad=fp8_grad)
        parallel = self._qshard.parallel
        gamma, beta, enter = self.layer_norm_weight, self.layer_norm_bias, None
        if parallel is not None:
            gamma, beta = parallel.replicated(gamma), parallel.replicated(beta)
            read = [getattr(self, name) for name in self.weight_names]
            enter = functools.partial(parallel.enter, format=self.message_format, weights=read)
        norm = self.normalization, gamma, beta, self.eps, self.zero_centered_gamma
        multiply = self.multiply(is_first_microbatch)
        weights, biases = self.parameters_to_multiply()
        parts, normed, inp = norm_linear(
            inp, norm, multiply, weights, biases, enter, needs_normed=self.return_layernorm_output
        )
        is_cut = parallel is not None and parallel.sequence_dim is not None
        if is_cut and self.return_layernorm_output and self.return_layernorm_output_gathered:
            normed = parallel.gather_values(normed)
        output = tuple(parts) if as_parts else joined(parts)
        more = [normed] if self.return_layernorm_output else []
        return self.with_bias(output, *more, *([inp] if with_input else []))

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"normalization={self.normalization}{self._qshard.shown_format()}"
        )
