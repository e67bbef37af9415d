"""A normalization and the MLP it feeds."""

import functools
from collections.abc import Callable

import torch
from torch.distributed.tensor import Shard
from torch.nn import init

from qshard.modules.calls import runs_as_steps
from qshard.nn.base import Initialized, returned
from qshard.nn.parts import initial
from qshard.nn.parts.activations import ACTIVATIONS, check_params, is_gated
from qshard.nn.parts.arguments import (
    NORMALIZATIONS,
    check_choice,
    refuse_arguments,
    rng_fork,
)
from qshard.nn.parts.fused import norm_mlp
from qshard.nn.parts.multiply import Multiply
from qshard.nn.parts.parallel import DeviceMeshes
from qshard.nn.parts.recompute import checkpointed
from qshard.tensor_parallel.local import local_part


FC1_HALVES = ("fc1_gate_", "fc1_up_")


@runs_as_steps
class LayerNormMLP(Initialized, DeviceMeshes, torch.nn.Module):
    """fc2(activation(fc1(norm(x)))). Parameters: layer_norm_weight, layer_norm_bias (not with RMSNorm),
    fc1_weight, fc1_bias, fc2_weight, fc2_bias; `quantize_` quantizes the two weights.

    hidden_size, ffn_hidden_size: sizes of the last dimension outside and inside.
    activation: "gelu", "qgelu", "relu", "srelu", "silu", or gated: "glu", "geglu", "qgeglu", "reglu",
        "sreglu", "swiglu", "clamped_swiglu". fc1_weight of a gated one has 2 x ffn_hidden_size rows,
        those of the gate first. Backward keeps an activation's input, nothing else.
    activation_params: of "clamped_swiglu": limit, alpha, glu_linear_offset.
    checkpoint: keep the input of the module only, and compute the rest again in backward; not under
        torch.func's transforms.
    output_layer_init_method(fc2_weight), init_method(fc1_weight): initial values; normal with a
        deviation of 0.023 without.
    set_parallel_mode: over tp_mesh or tp_group fc1 is a "column" and fc2 a "row"; without it both are
        whole on each rank. A gated fc1 then is fc1_gate_weight and fc1_up_weight, with biases, cut and
        quantized each by itself: no placement says which rows a rank has of both in one.
        load_state_dict takes either for the other. seq_length, micro_batch_size: change nothing.
    Others: as of LayerNormLinear.
    """

    weight_names = ("fc1_weight", "fc2_weight")
    fc1_names = ("fc1_",)  # of its weights and biases

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable | None = None,
        tp_group=None,
        tp_size: int = 1,
        init_method: Callable | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: dict | None = None,
        output_layer_init_method: Callable | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device=None,
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
        tp_mesh=None,
        weight_mesh=None,
    ):
        refuse_arguments("LayerNormMLP", locals())
        check_choice("LayerNormMLP", "normalization", normalization, NORMALIZATIONS)
        check_choice("LayerNormMLP", "activation", activation, ACTIVATIONS)
        check_params("LayerNormMLP", activation, activation_params)
        super().__init__()
        self.hidden_size, self.ffn_hidden_size, self.name = hidden_size, ffn_hidden_size, name
        self.eps, self.normalization = eps, normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.activation, self.activation_params = activation, activation_params
        self.use_bias, self.return_bias = bias, return_bias
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.checkpoint = checkpoint
        self.sequence_parallel, self.is_parallel = sequence_parallel, set_parallel_mode
        inner = ffn_hidden_size * (2 if is_gated(activation) else 1)
        options = {"device": device, "dtype": params_dtype}
        fork = rng_fork(get_rng_state_tracker)
        gamma = initial.gamma_init(zero_centered_gamma)
        first = init_method or initial.default_init_method
        second = output_layer_init_method or initial.default_init_method
        shapes = {
            "layer_norm_weight": ((hidden_size,), gamma, None),
            "layer_norm_bias": ((hidden_size,), init.zeros_, None),
            "fc1_weight": ((inner, hidden_size), first, fork),
            "fc1_bias": ((inner,), init.zeros_, None),
            "fc2_weight": ((hidden_size, ffn_hidden_size), second, fork),
            "fc2_bias": ((hidden_size,), init.zeros_, None),
        }
        absent = set() if bias else {"fc1_bias", "fc2_bias"}
        absent |= set() if normalization == "LayerNorm" else {"layer_norm_bias"}
        for parameter, (shape, initialize, forked) in shapes.items():
            if parameter in absent:
                self.register_parameter(parameter, None)
            else:
                self.add_parameter(parameter, shape, initialize, fork=forked, **options)
        self.parallelize(tp_group, tp_size, tp_mesh, weight_mesh)
        self.finish()

    def parallel_modes(self) -> dict[str, str | None]:
        first, second = ("column", "row") if self.is_parallel else (None, None)
        modes = {f"{name}{kind}": first for name in self.fc1_names for kind in ("weight", "bias")}
        return {**modes, "fc2_weight": second, "fc2_bias": second}

    def set_device_mesh(self, tp_mesh=None, weight_mesh=None) -> None:
        if tp_mesh is not None and self.is_parallel and is_gated(self.activation):
            if weight_mesh is not None:
                self._check_weight_mesh(tp_mesh, weight_mesh)
            self._check_device_mesh(tp_mesh.size(), {"fc2_weight": Shard(1)})  # as fc1's halves
            self._split_fc1()
        super().set_device_mesh(tp_mesh, weight_mesh)

    def _split_fc1(self):
        """Into parameters of the gate and of what it multiplies, with the values of the whole."""

        def split(values, cut):
            result = {}
            for name, value in values.items():
                if name.startswith("fc1_"):
                    halves = (name.replace("fc1_", half) for half in FC1_HALVES)
                    result.update(zip(halves, cut(value)))
                else:
                    result[name] = value
            return result

        def cut(parameter):
            if parameter is None:
                return None, None
            halves = parameter.detach().chunk(2)
            return [torch.nn.Parameter(h.clone(), parameter.requires_grad) for h in halves]

        parameters = split(self._parameters, cut)
        self._parameters.clear()
        self._parameters.update(parameters)
        self._initial = split(self._initial, lambda known: initial.halves(*known))
        self.fc1_names = FC1_HALVES
        self.weight_names = (*(f"{half}weight" for half in FC1_HALVES), "fc2_weight")

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        for kind in ("weight", "bias"):
            whole, halves = f"{prefix}fc1_{kind}", [f"{prefix}{half}{kind}" for half in FC1_HALVES]
            if len(self.fc1_names) > 1 and whole in state_dict:
                state_dict.update(zip(halves, state_dict.pop(whole).chunk(2)))
            elif len(self.fc1_names) == 1 and all(half in state_dict for half in halves):
                state_dict[whole] = torch.cat([state_dict.pop(half) for half in halves])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        *,
        adds_input: bool = False,
    ):
        """(..., hidden_size), the same shape out, or a tuple of it, fc2_bias (return_bias) and
        (..., hidden_size) norm(inp) (return_layernorm_output), in the dtype of `inp` or autocast's. adds_input: out
        is inp + that and fc2_bias, which is not returned."""
        multiply = Multiply(
            self._qshard.weight_only,
            self._qshard.weight_format,
            self.fuse_wgrad_accumulation,
            overwrite=is_first_microbatch is True,
        )
        if self.checkpoint:
            output, normed = checkpointed(self._mlp, inp, multiply, adds_input)
        else:
            output, normed = self._mlp(inp, multiply, adds_input)
        more = [normed] if self.return_layernorm_output else []
        if self.return_bias and not adds_input:
            is_summed = self._qshard.parallel is not None and self._qshard.parallel.sequence_dim is not None
            if self.use_bias:
                bias = returned(local_part(self.fc2_bias, is_summed), output.dtype)
            else:
                bias = output.new_empty(0)
            more = [bias, *more]
        return (output, *more) if more else output

    def _mlp(self, inp, multiply, adds_input):
        gamma, beta, enter = self.layer_norm_weight, self.layer_norm_bias, None
        first = [[getattr(self, f"{name}{kind}") for kind in ("weight", "bias")] for name in self.fc1_names]
        second = self.fc2_weight, None if self.return_bias and not adds_input else self.fc2_bias
        parallel, row = self._qshard.parallel, None
        if parallel is not None:
            gamma, beta = parallel.replicated(gamma), parallel.replicated(beta)
            read = [*(weight for weight, _ in first), second[0]]
            enter = functools.partial(parallel.enter, format=self.message_format, weights=read)
            row = parallel.in_mode("row" if self.is_parallel else None)
            first, second = [parallel.local(*pair) for pair in first], row.local(*second)
        output, normed = norm_mlp(
            inp,
            (self.normalization, gamma, beta, self.eps, self.zero_centered_gamma),
            self.activation,
            self.activation_params,
            multiply,
            first,
            second,
            enter,
            needs_normed=self.return_layernorm_output,
            adds_input=adds_input and row is None,
        )
        if row is not None:
            output = row.leave(output, self.message_format)
            output = inp + output if adds_input else output
            is_cut = parallel.sequence_dim is not None and self.is_parallel
            if is_cut and self.return_layernorm_output and self.return_layernorm_output_gathered:
                normed = parallel.gather_values(normed)
        return output, normed if self.return_layernorm_output else None

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, "
            f"normalization={self.normalization}, activation={self.activation}"
            f"{self._qshard.shown_format()}"
        )
