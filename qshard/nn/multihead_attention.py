"""Attention with its projections."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from qshard.modules.calls import does_forward_alone, runs_as_steps
from qshard.nn.dot_product_attention import DotProductAttention, check_heads
from qshard.nn.l2_normalization import L2Normalization
from qshard.nn.layer_norm import LayerNorm
from qshard.nn.layer_norm_linear import LayerNormLinear
from qshard.nn.linear import Linear
from qshard.nn.parts import initial
from qshard.nn.parts.arguments import NORMALIZATIONS, check_choice, refuse, refuse_arguments
from qshard.nn.parts.parallel import DeviceMeshes, check_ranks
from qshard.nn.rms_norm import RMSNorm
from qshard.nn.rotary import rotate, split_and_rotate, split_heads, tables_of

QK_NORMS = (None, "L2Normalization", "RMSNorm", "LayerNorm")


@runs_as_steps
class MultiheadAttention(DeviceMeshes, nn.Module):
    """proj(attention(queries, keys, values)), all projected from the input; keys and values of
    attention_type="cross" from encoder_output.

    Modules: layernorm_qkv (input_layernorm) or qkv of self attention; layernorm_query or query_layer, and
    key_value, of cross attention; core_attention; proj; q_norm and k_norm with qk_norm_type.

    hidden_size, num_attention_heads; kv_channels: channels of a head, hidden_size / heads without;
        num_gqa_groups: heads of keys and values.
    fuse_qkv_params: one weight for queries, keys and values, instead of query_weight, key_weight,
        value_weight, each quantized by itself. qkv_weight_interleaved: the fused weight's rows are by
        group: its queries, its key, its value; else all queries, all keys, all values.
    input_layernorm: normalize the input first (layernorm_epsilon, normalization, zero_centered_gamma);
        return_layernorm_output: return that, too.
    qk_norm_type: normalize queries and keys, by "L2Normalization", "RMSNorm" or "LayerNorm" of
        qk_norm_eps, after the rotary embedding, or before it with qk_norm_before_rope.
    rotary_pos_interleaved: neighbouring channels are rotated as a pair.
    init_method: of the weights of queries, keys and values; output_layer_init_method: of proj's.
    attention_dropout, attn_mask_type, window_size, bottom_right_diagonal, softcap, softmax_type,
        qkv_format, get_rng_state_tracker: as of DotProductAttention.
    bias, return_bias, fuse_wgrad_accumulation, params_dtype: as of LayerNormLinear.
    set_parallel_mode: over tp_group, or the mesh of set_device_mesh, the heads are cut over the ranks:
        queries, keys and values are "column", proj is a "row"; without it all is whole on each rank.
        Not of a fused weight that is not interleaved. sequence_parallel: as of Linear.
    seq_length, micro_batch_size, layer_number and name change nothing; ub_* raise NotImplementedError.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Callable | None = None,
        output_layer_init_method: Callable | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        tp_group=None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device=None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
    ):
        refuse_arguments("MultiheadAttention", locals())
        ranks = check_ranks("MultiheadAttention", tp_group, tp_size)
        check_choice("MultiheadAttention", "attention_type", attention_type, ("self", "cross"))
        check_choice("MultiheadAttention", "normalization", normalization, NORMALIZATIONS)
        check_choice("MultiheadAttention", "qk_norm_type", qk_norm_type, QK_NORMS)
        super().__init__()
        self.attention_type, self.input_layernorm = attention_type, input_layernorm
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        self.channels = kv_channels or hidden_size // num_attention_heads
        self.qkv_format, self.rotary_pos_interleaved = qkv_format, rotary_pos_interleaved
        self.qkv_weight_interleaved = qkv_weight_interleaved and fuse_qkv_params
        self.qk_norm_before_rope = qk_norm_before_rope
        self.layer_number, self.name = layer_number or 1, name
        self.fuse_qkv_params, self.is_parallel = fuse_qkv_params, set_parallel_mode
        self.sequence_parallel = sequence_parallel
        self.check_parts(ranks)

        common = {
            "tp_group": tp_group,
            "tp_size": tp_size,
            "sequence_parallel": sequence_parallel,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "get_rng_state_tracker": get_rng_state_tracker,
            "params_dtype": params_dtype,
            "device": device,
            "bias": bias,
        }
        first = {
            "init_method": init_method or initial.default_init_method,
            "parallel_mode": "column" if set_parallel_mode else None,
            **common,
        }
        normed = {
            "eps": layernorm_epsilon,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "return_layernorm_output": return_layernorm_output,
            **first,
        }
        of_queries = self.channels * num_attention_heads
        of_keys = self.channels * self.num_gqa_groups

        def split(**sizes):
            return None if fuse_qkv_params else sizes

        if qk_norm_type is None:
            self.q_norm = self.k_norm = None
        elif qk_norm_type == "L2Normalization":
            self.q_norm = self.k_norm = L2Normalization(eps=qk_norm_eps)
        else:
            norm = RMSNorm if qk_norm_type == "RMSNorm" else LayerNorm
            options = {"eps": qk_norm_eps, "params_dtype": params_dtype, "device": device}
            self.q_norm, self.k_norm = (norm(self.channels, **options) for _ in range(2))
            for norm in (self.q_norm, self.k_norm):
                norm.is_of_heads = set_parallel_mode
                norm.parallelize(tp_group, tp_size, None, None)
        if attention_type == "self":
            rows = of_queries + 2 * of_keys
            parts = split(query=of_queries, key=of_keys, value=of_keys)
            if input_layernorm:
                self.layernorm_qkv = LayerNormLinear(
                    hidden_size, rows, parameters_split=parts, **normed
                )
            else:
                self.qkv = Linear(hidden_size, rows, parameters_split=parts, **first)
        else:
            if input_layernorm:
                self.layernorm_query = LayerNormLinear(
                    hidden_size, of_queries, parameters_split=split(query=of_queries), **normed
                )
            else:
                self.query_layer = Linear(hidden_size, of_queries, **first)
            parts = split(key=of_keys, value=of_keys)
            self.key_value = Linear(hidden_size, 2 * of_keys, parameters_split=parts, **first)
        self.core_attention = DotProductAttention(
            num_attention_heads,
            self.channels,
            num_gqa_groups=self.num_gqa_groups,
            attention_dropout=attention_dropout,
            qkv_format=qkv_format,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            softcap=softcap,
            get_rng_state_tracker=get_rng_state_tracker,
            attention_type=attention_type,
            softmax_type=softmax_type,
            tp_group=tp_group if set_parallel_mode else None,
            tp_size=tp_size if set_parallel_mode else 1,
            device=device,
        )
        self.proj = Linear(
            of_queries,
            hidden_size,
            init_method=output_layer_init_method or initial.default_init_method,
            return_bias=return_bias,
            parallel_mode="row" if set_parallel_mode else None,
            **common,
        )

    def check_parts(self, ranks: int) -> None:
        if ranks == 1:
            return
        if not self.is_parallel:
            if self.sequence_parallel:
                raise NotImplementedError(
                    "qshard.nn.MultiheadAttention: sequence_parallel without set_parallel_mode is not "
                    "supported: tokens would attend to those of their own rank only"
                )
            return
        check_heads("MultiheadAttention", self.num_gqa_groups, ranks)
        if self.fuse_qkv_params and not self.qkv_weight_interleaved:
            raise NotImplementedError(
                "qshard.nn.MultiheadAttention: tensor parallelism with fuse_qkv_params and "
                "qkv_weight_interleaved=False is not supported: cutting the weight by rows would part "
                "queries from their keys; interleave it, or use fuse_qkv_params=False"
            )

    def set_device_mesh(self, tp_mesh=None, weight_mesh=None) -> None:
        """As of LayerNormLinear, of all parts; the heads are cut with set_parallel_mode only."""
        if tp_mesh is not None:
            self.check_parts(tp_mesh.size())
        for name, part in reversed(list(self.named_children())):  # those that may refuse first
            if isinstance(part, DeviceMeshes) and (self.is_parallel or name != "core_attention"):
                part.set_device_mesh(tp_mesh, weight_mesh)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params=None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
        thd_attention_policies=None,
        thd_attention_policy_dispatch: str = "auto",
        softcap: float | None = None,
        *,
        adds_input: bool = False,
    ):
        """hidden_states: (s, b, hidden_size) of qkv_format "sbhd", (b, s, hidden_size) of "bshd"; the
        same shape out, or a tuple of it, proj's bias (return_bias) and the normalized input
        (return_layernorm_output). adds_input: out is hidden_states + that and the bias, which is not
        returned.

        encoder_output: of cross attention, as hidden_states. rotary_pos_emb: (s, 1, 1, channels or
        fewer) angles, or two of them, for queries and for keys. inference_params: refused. Others: as
        of DotProductAttention.
        """
        refuse("MultiheadAttention", inference_params=inference_params)
        if hidden_states.dim() != 3:
            raise ValueError(
                "qshard.nn.MultiheadAttention: hidden_states has three dimensions, two of them of "
                f"qkv_format={self.qkv_format!r}; got {tuple(hidden_states.shape)}"
            )
        if self.attention_type == "self":
            projected, normed, hidden_states = self._project_self(hidden_states, is_first_microbatch)
        else:
            if encoder_output is None:
                raise ValueError("qshard.nn.MultiheadAttention: cross attention needs encoder_output")
            query, normed, hidden_states = self._project_query(hidden_states, is_first_microbatch)
            projected = [query, *self._project_keys(encoder_output, is_first_microbatch)]
        query, key, value = self._position(projected, rotary_pos_emb)
        context = self.core_attention(
            query,
            key,
            value,
            attention_mask=attention_mask,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            softcap=softcap,
            checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            pad_between_seqs=pad_between_seqs,
            thd_attention_policies=thd_attention_policies,
            thd_attention_policy_dispatch=thd_attention_policy_dispatch,
        )
        more = {}
        if does_forward_alone(self.proj):
            # Attention's backward reads what it gave, unless it is computed again.
            more["input_is_kept"] = not checkpoint_core_attention
            if adds_input:
                more["residual"] = hidden_states
        output = self.proj(context, is_first_microbatch, **more)
        output, *bias = output if isinstance(output, tuple) else (output,)
        if adds_input and "residual" not in more:
            output = hidden_states + (output + bias[0] if bias and bias[0].numel() else output)
            bias = []
        elif self.return_bias and not (adds_input or bias):  # a proj that is not ours adds it
            bias = [output.new_empty(0)]
        more = [*bias, *([] if normed is None else [normed])]
        return (output, *more) if more else output

    def _project_self(self, x, is_first_microbatch):
        """Queries, keys and values in one tensor (., ., heads of all, channels), or in three."""
        module = self.layernorm_qkv if self.input_layernorm else self.qkv
        heads = self.num_attention_heads, self.num_gqa_groups, self.num_gqa_groups
        parts, normed, x = self._project(module, x, is_first_microbatch, heads)
        parts = [part.unflatten(-1, (-1, self.channels)) for part in parts]
        return parts[0] if len(parts) == 1 else parts, normed, x

    def _project_query(self, x, is_first_microbatch):
        module = self.layernorm_query if self.input_layernorm else self.query_layer
        (query,), normed, x = self._project(module, x, is_first_microbatch, (self.num_attention_heads,))
        return query.unflatten(-1, (-1, self.channels)), normed, x

    def _project_keys(self, x, is_first_microbatch):
        heads = self.num_gqa_groups, self.num_gqa_groups
        parts, _, _ = self._project(self.key_value, x, is_first_microbatch, heads)
        if len(parts) == 2:
            return [part.unflatten(-1, (-1, self.channels)) for part in parts]
        if self.qkv_weight_interleaved:
            return parts[0].unflatten(-1, (-1, 2, self.channels)).unbind(-2)
        return parts[0].unflatten(-1, (2, -1, self.channels)).unbind(-3)

    def _project(self, module, x, is_first_microbatch, heads):
        """What a projection gives, by its weights: one of all heads, or one for each of `heads`; the normalized
        input, if it returns that; and x, to add something to."""
        if does_forward_alone(module):
            more = {"with_input": True} if isinstance(module, LayerNormLinear) else {}
            output = module(x, is_first_microbatch, as_parts=True, **more)
            if not more:
                return output, None, x
            parts, *normed, x = output
            return parts, normed[0] if normed else None, x
        # Hooks see, and forwards of others take and give, what TransformerEngine's do.
        output = module(x, is_first_microbatch)
        output, *normed = output if isinstance(output, tuple) else (output,)
        ranks = self.core_attention.ranks
        sizes = [count // ranks * self.channels for count in heads]
        parts = [output] if self.fuse_qkv_params else output.split(sizes, -1)
        return parts, normed[0] if normed else None, x

    def _position(self, projected, rotary_pos_emb):
        """Queries, keys and values, of one tensor or of three, normalized and rotated."""
        dim = 0 if self.qkv_format == "sbhd" else 1
        pair = isinstance(rotary_pos_emb, (tuple, list))
        angles = rotary_pos_emb if pair else (rotary_pos_emb, rotary_pos_emb)
        is_one = isinstance(projected, Tensor)
        rotates_first = self.q_norm is None or not self.qk_norm_before_rope
        if is_one and rotary_pos_emb is not None and rotates_first and angles[0] is angles[1]:
            tables = tables_of(projected, angles[0], dim)
            query, key, value = split_and_rotate(
                projected, *tables, self._heads_of_group(), dim, self.rotary_pos_interleaved
            )
            return *self._normalize(query, key, value.dtype), value
        query, key, value = split_heads(projected, self._heads_of_group()) if is_one else projected
        if not rotates_first:
            query, key = self._normalize(query, key, value.dtype)
        if rotary_pos_emb is not None:
            tables = [tables_of(query, angles[0], dim)]
            is_same = angles[0] is angles[1] and query.shape[dim] == key.shape[dim]
            tables.append(tables[0] if is_same else tables_of(key, angles[1], dim))
            query, key = (
                rotate(x, *table, dim, self.rotary_pos_interleaved)
                for x, table in zip((query, key), tables)
            )
            if torch.is_grad_enabled():
                # Attention keeps it for backward, and a view would keep the whole projection: queries and keys
                # are tensors of their own by now.
                value = value.contiguous()
        if rotates_first:
            query, key = self._normalize(query, key, value.dtype)
        return query, key, value

    def _heads_of_group(self):
        """Numbers of heads of queries, keys and values in a fused projection, or in each group of it where its
        weight is interleaved."""
        ranks = self.core_attention.ranks
        heads, groups = self.num_attention_heads // ranks, self.num_gqa_groups // ranks
        return [heads // groups, 1, 1] if self.qkv_weight_interleaved else [heads, groups, groups]

    def _normalize(self, query, key, dtype):
        """In the dtype of values: that of the norms' own results is their parameters'."""
        if self.q_norm is None:
            return query, key
        return self.q_norm(query).to(dtype), self.k_norm(key).to(dtype)
