"""A transformer layer: attention, and an MLP."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qshard.modules.calls import does_forward_alone
from qshard.nn.layer_norm import LayerNorm
from qshard.nn.layer_norm_mlp import LayerNormMLP
from qshard.nn.multihead_attention import MultiheadAttention
from qshard.nn.parts.arguments import check_choice, refuse
from qshard.nn.parts.attention_mask import mask_type_of
from qshard.nn.parts.autocast import activation_dtype
from qshard.nn.parts.parallel import DeviceMeshes, check_ranks
from qshard.nn.rms_norm import RMSNorm


class TransformerLayer(DeviceMeshes, nn.Module):
    """Self attention, cross attention in a decoder, and an MLP, each added to its input.

    Modules: self_attention, inter_attention (layer_type "decoder"), layernorm_mlp, layernorm
    (output_layernorm).

    hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups, kv_channels: sizes.
    hidden_dropout: of what is added to the residual; attention_dropout: of attention's probabilities.
    drop_path_rate: probability with which a sample's attention or MLP is left out in training, by the
        first dimension.
    layer_type: "encoder", or "decoder", which attends to encoder_output, too (enc_dec_attn_mask_type,
        enc_dec_window_size, enc_dec_bottom_right_diagonal).
    apply_residual_connection_post_layernorm: residuals are the normalized inputs.
    output_layernorm: normalize the output, and not the input of self attention.
    parallel_attention_mlp: attention and MLP have one input, and their sum is added to it.
    self_attn_mask_type, window_size, bottom_right_diagonal, softcap, softmax_type: as of
        DotProductAttention; attn_input_format is its qkv_format.
    activation, activation_params: as of LayerNormMLP. Others: as of MultiheadAttention.
    ub_overlap_ag, ub_overlap_rs, ub_bulk_dgrad, ub_bulk_wgrad change nothing without
        ub_tp_comm_overlap, which raises NotImplementedError.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Callable | None = None,
        output_layer_init_method: Callable | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group=None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict | None = None,
        normalization: str = "LayerNorm",
        device=None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
    ):
        refuse(
            "TransformerLayer",
            ub_tp_comm_overlap=ub_tp_comm_overlap,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
        )
        check_ranks("TransformerLayer", tp_group, tp_size)
        check_choice("TransformerLayer", "layer_type", layer_type, ("encoder", "decoder"))
        if parallel_attention_mlp:
            for argument, is_given in (
                ("layer_type='decoder'", layer_type == "decoder"),
                ("output_layernorm", output_layernorm),
                (
                    "apply_residual_connection_post_layernorm",
                    apply_residual_connection_post_layernorm,
                ),
            ):
                if is_given:
                    raise ValueError(
                        "qshard.nn.TransformerLayer: parallel_attention_mlp does not go with "
                        f"{argument}"
                    )
        if fuse_wgrad_accumulation and not fuse_qkv_params:
            raise ValueError(
                "qshard.nn.TransformerLayer: fuse_wgrad_accumulation needs fuse_qkv_params=True"
            )
        super().__init__()
        self.self_attn_mask_type = mask_type_of(self_attn_mask_type)
        self.window_size, self.bottom_right_diagonal = window_size, bottom_right_diagonal
        self.enc_dec_attn_mask_type = mask_type_of(enc_dec_attn_mask_type)
        self.enc_dec_window_size = enc_dec_window_size
        self.enc_dec_bottom_right_diagonal = enc_dec_bottom_right_diagonal
        self.softcap, self.layer_type = softcap, layer_type
        self.layer_number, self.name = layer_number, name
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        self.parallel_attention_mlp = parallel_attention_mlp
        self.hidden_dropout, self.drop_path_rate = hidden_dropout, drop_path_rate

        common = {
            "tp_group": tp_group,
            "tp_size": tp_size,
            "sequence_parallel": sequence_parallel,
            "set_parallel_mode": set_parallel_mode,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "get_rng_state_tracker": get_rng_state_tracker,
            "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
            "bias": bias,
            "params_dtype": params_dtype,
            "return_layernorm_output": apply_residual_connection_post_layernorm,
            "zero_centered_gamma": zero_centered_gamma,
            "normalization": normalization,
            "device": device,
        }
        attention = {
            "kv_channels": kv_channels,
            "attention_dropout": attention_dropout,
            "layernorm_epsilon": layernorm_epsilon,
            "layer_number": layer_number,
            "softcap": softcap,
            "num_gqa_groups": num_gqa_groups,
            "fuse_qkv_params": fuse_qkv_params,
            "qkv_weight_interleaved": qkv_weight_interleaved,
            "rotary_pos_interleaved": rotary_pos_interleaved,
            "qkv_format": attn_input_format,
            "qk_norm_type": qk_norm_type,
            "qk_norm_eps": qk_norm_eps,
            "qk_norm_before_rope": qk_norm_before_rope,
            "softmax_type": softmax_type,
            **common,
        }
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            input_layernorm=not output_layernorm,
            return_bias=not parallel_attention_mlp,
            **attention,
        )
        if layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                hidden_size,
                num_attention_heads,
                attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal,
                input_layernorm=True,
                attention_type="cross",
                return_bias=True,
                **attention,
            )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            eps=layernorm_epsilon,
            activation=activation,
            activation_params=activation_params,
            return_bias=not parallel_attention_mlp,
            **common,
        )
        self.layernorm = None
        if output_layernorm:
            norm = RMSNorm if normalization == "RMSNorm" else LayerNorm
            self.layernorm = norm(
                hidden_size,
                eps=layernorm_epsilon,
                params_dtype=params_dtype,
                zero_centered_gamma=zero_centered_gamma,
                sequence_parallel=sequence_parallel or None,
                device=device,
            )
            self.layernorm.parallelize(tp_group, tp_size, None, None)

    def check_parts(self, ranks: int) -> None:
        self.self_attention.check_parts(ranks)
        if self.layer_type == "decoder":
            self.inter_attention.check_parts(ranks)

    def set_device_mesh(self, tp_mesh=None, weight_mesh=None) -> None:
        """As of LayerNormLinear, of all parts."""
        if tp_mesh is not None:
            self.check_parts(tp_mesh.size())
        for part in self.children():
            if isinstance(part, DeviceMeshes):
                part.set_device_mesh(tp_mesh, weight_mesh)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
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
    ) -> Tensor:
        """hidden_states: (s, b, hidden_size) of attn_input_format "sbhd", (b, s, hidden_size) of "bshd";
        the same shape out.

        attention_mask, self_attn_mask_type, window_size, bottom_right_diagonal: of self attention;
        enc_dec_*: of cross attention to encoder_output. Others: as of MultiheadAttention.
        """
        refuse("TransformerLayer", inference_params=inference_params)
        common = {
            "is_first_microbatch": is_first_microbatch,
            "checkpoint_core_attention": checkpoint_core_attention,
            "rotary_pos_emb": rotary_pos_emb,
            "core_attention_bias_type": core_attention_bias_type,
            "core_attention_bias": core_attention_bias,
            "alibi_slopes": alibi_slopes,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_q_padded": cu_seqlens_q_padded,
            "pad_between_seqs": pad_between_seqs,
            "thd_attention_policies": thd_attention_policies,
            "thd_attention_policy_dispatch": thd_attention_policy_dispatch,
            "softcap": softcap,
        }
        hidden_states = hidden_states.to(activation_dtype(hidden_states))
        self_attention = functools.partial(
            self.self_attention,
            attention_mask=attention_mask,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            cu_seqlens_kv=cu_seqlens_q,
            cu_seqlens_kv_padded=cu_seqlens_q_padded,
            **common,
        )
        if self.parallel_attention_mlp:
            attention = self_attention(hidden_states)
            mlp = self.layernorm_mlp(hidden_states, is_first_microbatch)
            return self._add(attention, mlp, hidden_states, drops_path=True)
        hidden_states = self._with_block(self_attention, hidden_states, drops_path=True)
        if self.layer_type == "decoder":
            inter_attention = functools.partial(
                self.inter_attention,
                attention_mask=enc_dec_attn_mask,
                attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal,
                encoder_output=encoder_output,
                cu_seqlens_kv=cu_seqlens_kv,
                cu_seqlens_kv_padded=cu_seqlens_kv_padded,
                **common,
            )
            hidden_states = self._with_block(inter_attention, hidden_states, drops_path=False)
        mlp = functools.partial(self.layernorm_mlp, is_first_microbatch=is_first_microbatch)
        output = self._with_block(mlp, hidden_states, drops_path=True)
        return output if self.layernorm is None else self.layernorm(output)

    def _with_block(self, block, x, drops_path):
        """What block(x) gives, added to x or, if that is the residual, to its normalized input."""
        if self._adds_as_it_is(block.func, drops_path):
            return block(x, adds_input=True)
        output = block(x)
        output, *more = output if isinstance(output, tuple) else (output,)
        bias, *normed = more or [None]
        return self._add(output, bias, normed[0] if normed else x, drops_path)

    def _adds_as_it_is(self, module, drops_path):
        """Whether a block itself may add its output to its input: nothing is done to the output before, and
        neither the block nor its last linear does more than its forward."""
        is_dropped = self.hidden_dropout or (drops_path and self.drop_path_rate)
        if (is_dropped and self.training) or self.apply_residual_connection_post_layernorm:
            return False
        if not does_forward_alone(module):
            return False
        last = module if isinstance(module, LayerNormMLP) else module.proj
        return does_forward_alone(last) and not getattr(last, "use_bias", False)

    def _add(self, x, bias, residual, drops_path):
        if bias is not None and bias.numel():
            x = x + bias
        x = F.dropout(x, self.hidden_dropout, self.training)
        if drops_path:
            x = self._drop_path(x)
        return residual + x

    def _drop_path(self, x):
        """x / keep for samples that are kept, 0 for others."""
        if not self.drop_path_rate or not self.training:
            return x
        keep = 1 - self.drop_path_rate
        shape = (x.shape[0],) + (1,) * (x.dim() - 1)
        return x / keep * torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(keep)
