"""Linears of experts, whose matrices are one stack."""

import itertools
import re
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import init

from qshard._runtime.hooks import holds_codes
from qshard.nn.base import Initialized, returned
from qshard.nn.parts import initial
from qshard.nn.parts.arguments import PARALLEL_MODES, check_choice, refuse, refuse_arguments, rng_fork
from qshard.nn.parts.grouped import ends_of_counts, grouped_linear, local_part, swiglu_experts
from qshard.nn.parts.multiply import Multiply
from qshard.nn.parts.parallel import check_ranks


class Grouped(Initialized, torch.nn.Module):
    """Modules that multiply rows of each expert by its own matrices."""

    fuse_wgrad_accumulation = False

    @property
    def message_format(self) -> str | None:
        """The format that rows are quantized to meet: that of the weights. None of plain ones, and with weight_only."""
        return self._qshard.message_format

    def multiply(self, x: Tensor, name: str, offs: Tensor, bias: Tensor | None = None, overwrite: bool = False) -> Tensor:
        """By the stack of this name. overwrite: wgrad replaces what main_grad holds."""
        weight, state = local_part(getattr(self, name)), self._qshard
        how = Multiply(state.weight_only, state.weight_format, self.fuse_wgrad_accumulation, overwrite)

        def run(x, weight):
            return grouped_linear(
                x,
                weight,
                offs,
                is_quantized=state.weight_format is not None,
                weight_only=state.weight_only,
                weight_format=state.weight_format,
                bias=local_part(bias),
            )

        return how.run(run, x, weight)


class GroupedLinear(Grouped):
    """TransformerEngine's: y_i = x_i @ weight_i^T + bias_i of each of `num_gemms` parts of the input. The weights are
    one parameter `weight` (num_gemms, out_features, in_features), which quantizes matrix by matrix, the biases one of
    (num_gemms, out_features).

    A state_dict has TransformerEngine's names, weight0, weight1, …, bias0, …, views of the stack; that of a sharded stack
    has the stack, by the name `weight`, since no placement is that of a matrix which one rank has. load_state_dict takes
    either. `layer.weight0` is a view, too, and no parameter.

    init_method(weight): initial values of each matrix; TransformerEngine's normal ones without. Biases are zeros.
    return_bias: forward returns (output, a copy of the biases), which are not added.
    fuse_wgrad_accumulation: the gradient of `weight` is added to its attribute `main_grad`, eager mode only.
    params_dtype, get_rng_state_tracker, rng_tracker_name, device, name: as of Linear.
    parallel_mode, tp_group, tp_size: of one rank. Tensor parallelism would cut the matrices themselves; experts are
        handed out whole, by Shard(0) of the stack.
    save_original_input, single_grouped_weight, single_grouped_bias, use_grouped_tensor: change nothing here. `ub_*`
        and delay_wgrad_compute raise NotImplementedError.
    """

    weight_names = ("weight",)

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group=None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device=None,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool = False,
    ):
        refuse_arguments("GroupedLinear", locals())
        check_choice("GroupedLinear", "parallel_mode", parallel_mode, PARALLEL_MODES)
        if check_ranks("GroupedLinear", tp_group, tp_size, None) > 1:
            raise NotImplementedError(
                "qshard.nn.GroupedLinear: tensor parallelism of more than one rank would cut the matrices of all experts; "
                "hand experts out whole, by distribute_tensor(layer.weight, ep_mesh, [Shard(0)])"
            )
        super().__init__()
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.use_bias, self.return_bias, self.name = bias, return_bias, name
        self.parallel_mode, self.sequence_parallel = parallel_mode, sequence_parallel
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        options = {"device": device, "dtype": params_dtype}
        each = initial.each_matrix(init_method or initial.default_init_method)
        fork = rng_fork(get_rng_state_tracker, rng_tracker_name)
        self.add_parameter("weight", (num_gemms, out_features, in_features), each, fork=fork, **options)
        if bias:
            self.add_parameter("bias", (num_gemms, out_features), init.zeros_, **options)
        else:
            self.register_parameter("bias", None)
        self.finish()

    def forward(
        self,
        inp: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ):
        """(..., in_features) -> (..., out_features) in the dtype of `inp`; with return_bias (output, biases).

        m_splits: how many rows each matrix gets, one part after the other, as a list of ints, or as a tensor of
            integers, which is not read by the host. Rows behind them give zeros; a list has to name all."""
        refuse("GroupedLinear", out=out, dgrad_out=dgrad_out)
        rows = inp.reshape(-1, self.in_features)
        offs = self._offs(m_splits, rows)
        bias = self.bias if self.use_bias and not self.return_bias else None
        y = self.multiply(rows, "weight", offs, bias, overwrite=is_first_microbatch is True)
        y = y.view(*inp.shape[:-1], self.out_features)
        if not self.return_bias:
            return y
        return y, returned(self.bias, y.dtype) if self.use_bias else y.new_empty(0)

    def _offs(self, m_splits, rows):
        if isinstance(m_splits, Tensor):
            if m_splits.shape != (self.num_gemms,) or m_splits.is_floating_point():
                raise ValueError(
                    f"qshard.nn.GroupedLinear: m_splits must be {self.num_gemms} integers, got {m_splits.dtype} of "
                    f"shape {tuple(m_splits.shape)}"
                )
            return ends_of_counts(m_splits.to(rows.device, non_blocking=True))
        ends = list(itertools.accumulate(m_splits))
        if len(ends) != self.num_gemms or min(m_splits) < 0 or ends[-1] != len(rows):
            raise ValueError(
                f"qshard.nn.GroupedLinear: m_splits must be {self.num_gemms} numbers of rows that sum to the input's "
                f"{len(rows)}, got {list(m_splits)}"
            )
        offs = torch.tensor(ends, dtype=torch.int32)
        return offs.pin_memory().to(rows.device, non_blocking=True) if rows.is_cuda else offs.to(rows.device)

    def __getattr__(self, name):
        """TransformerEngine's names, as DCP asks for what state_dicts have."""
        match = re.fullmatch(r"(weight|bias)(\d+)", name)
        stack = self._parameters.get(match[1]) if match else None
        if stack is None or int(match[2]) >= self.num_gemms:
            return super().__getattr__(name)
        return stack[int(match[2])]

    def state_dict(self, *args, prefix: str = "", keep_vars: bool = False, **kwargs):
        destination = super().state_dict(*args, prefix=prefix, keep_vars=keep_vars, **kwargs)
        for name in () if keep_vars else ("weight", "bias"):  # keep_vars asks for the parameters themselves
            stack = destination.get(prefix + name)
            if stack is None or isinstance(stack, DTensor):
                continue
            del destination[prefix + name]
            destination.update((f"{prefix}{name}{i}", stack[i]) for i in range(self.num_gemms))
        return destination

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        for name in ("weight", "bias"):
            keys = [f"{prefix}{name}{i}" for i in range(self.num_gemms)]
            if self._parameters.get(name) is None or not all(key in state_dict for key in keys):
                continue
            matrices = [state_dict.pop(key) for key in keys]
            shapes = {tuple(matrix.shape) for matrix in matrices}
            if len(shapes) > 1:
                errors.append(f"{prefix}{name}0 and those that follow have different shapes: {sorted(shapes)}")
            else:
                state_dict[prefix + name] = _stacked(matrices, self._parameters[name])
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def extra_repr(self) -> str:
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}{self._qshard.shown_format()}"
        )


class GroupedExperts(Grouped):
    """torchtitan's: SwiGLU MLPs of experts, with its parameters w1 and w3 (num_experts, hidden_dim, dim), of the gate
    and of what it multiplies, and w2 (num_experts, dim, hidden_dim).

    Rows are expert by expert, and may go on behind the last expert's: these give zeros. No number of rows is asked of
    an expert. Parameters that ExpertParallel has made DTensors multiply as their local parts.

    init_std: of w2 and w3; w1 has 0.02, as torchtitan's. device, dtype: of the parameters.
    """

    weight_names = ("w1", "w2", "w3")

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        *,
        init_std: float = 0.02,
        device=None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.dim, self.hidden_dim, self.num_experts = dim, hidden_dim, num_experts
        shapes = {"w1": (hidden_dim, dim), "w2": (dim, hidden_dim), "w3": (hidden_dim, dim)}
        for name, shape in shapes.items():
            self.add_parameter(name, (num_experts, *shape), init.zeros_, device=device, dtype=dtype)
        self._initialize_with(init_std)
        self.finish()

    def _initialize_with(self, init_std):
        for name, (_, fork) in self._initial.items():
            std = 0.02 if name == "w1" else init_std
            self._initial[name] = initial.truncated_normal(std), fork

    def init_weights(self, init_std: float) -> None:
        """Initial values, as torchtitan asks for."""
        self._initialize_with(init_std)
        self.reset_parameters()

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """x: (rows, dim); num_tokens_per_expert: (num_experts,), how many rows each expert gets, one after the other.
        (rows, dim) in the dtype of x."""
        offs, state = ends_of_counts(num_tokens_per_expert), self._qshard
        if state.weight_format is not None:  # the same bits, of one operator
            stacks = (local_part(stack) for stack in (self.w1, self.w3, self.w2))
            return swiglu_experts(
                x,
                *stacks,
                offs,
                weight_only=state.weight_only,
                format=state.weight_format,
                down_format=state.weight_format,
            )
        h = F.silu(self.multiply(x, "w1", offs)) * self.multiply(x, "w3", offs)
        return self.multiply(h, "w2", offs)

    def extra_repr(self) -> str:
        sizes = f"dim={self.dim}, hidden_dim={self.hidden_dim}, num_experts={self.num_experts}"
        return f"{sizes}{self._qshard.shown_format()}"


def _stacked(matrices, parameter):
    """Matrices of a state_dict as one. Quantized ones, of a layer without masters, keep their codes in one like it."""
    if not any(map(holds_codes, matrices)):
        return torch.stack(matrices)
    like = parameter.detach() if holds_codes(parameter) else matrices[0].new_empty(parameter.shape)
    stack = torch.empty_like(like)
    for place, matrix in zip(stack, matrices):
        place.copy_(matrix)
    return stack
