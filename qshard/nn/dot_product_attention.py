"""Attention, by torch's scaled_dot_product_attention."""

import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qshard.nn.base import Initialized
from qshard.nn.parts.arguments import (
    check_choice,
    refuse,
    refuse_context_parallelism,
    rng_fork,
)
from qshard.nn.parts.attention_bias import alibi_slopes as slopes_of
from qshard.nn.parts.attention_bias import bias_of
from qshard.nn.parts.attention_mask import (
    Mask,
    is_bottom_right,
    make_mask,
    mask_type_of,
    padding_masks,
    window_of,
)
from qshard.nn.parts.autocast import activation_dtype, autocast_dtype
from qshard.nn.parts.parallel import DeviceMeshes
from qshard.nn.parts.recompute import checkpointed

FORMATS = ("sbhd", "bshd")
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


class DotProductAttention(Initialized, DeviceMeshes, nn.Module):
    """softmax(query @ key^T * softmax_scale) @ value for each head, by torch's
    scaled_dot_product_attention, which picks cuDNN's, FlashAttention's or its own kernel.

    num_attention_heads, kv_channels: heads, and channels of each; (of queries and keys, of values) where
        they differ. num_gqa_groups: heads of keys and values; as many as there are without.
    qkv_format: "sbhd" or "bshd", order of the dimensions of queries, keys and values.
    attn_mask_type: "no_mask", "causal" (from the first query and key), "causal_bottom_right" (to the
        last), "padding" and "padding_causal", "padding_causal_bottom_right", "arbitrary".
    window_size: (left, right) keys around the diagonal that a query attends to, -1 for all;
        bottom_right_diagonal says which diagonal where the mask's name does not.
    softcap: scores become softcap * tanh(scores / softcap); 0 for none. softmax_type: "vanilla",
        "off-by-one" or "learnable", a score of 0 or a parameter softmax_offset (heads,) beside those of
        keys. Both materialize the scores, (batch, heads, queries, keys): slower, and more memory.
    attention_dropout: in training; by get_rng_state_tracker's fork() if given.
    softmax_scale: 1 / sqrt(channels of keys) without.
    Masks other than no_mask and causal, and biases, are given to torch as a tensor, for which it has
    fewer fast kernels. A query that is padding, or that no key is left for, gets zeros.
    tp_group, set_device_mesh: heads and groups are cut over the ranks in equal parts; forward takes a
        rank's own. Masks, biases and slopes may be of all heads.
    thd, return_max_logit, more than one rank of cp_group raise NotImplementedError.
    attention_type: "self" or "cross". layer_number, name and the other arguments of context parallelism
        (`cp_...`) change nothing.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        tp_group=None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group=None,
        cp_global_ranks: list[int] | None = None,
        cp_stream=None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
        *,
        device=None,
    ):
        refuse("DotProductAttention", return_max_logit=return_max_logit)
        refuse_context_parallelism("DotProductAttention", cp_group)
        _check_format(qkv_format)
        check_choice("DotProductAttention", "attention_type", attention_type, ("self", "cross"))
        check_choice("DotProductAttention", "softmax_type", softmax_type, SOFTMAX_TYPES)
        num_gqa_groups = num_gqa_groups or num_attention_heads
        if num_attention_heads % num_gqa_groups:
            raise ValueError(
                f"qshard.nn.DotProductAttention: {num_attention_heads} heads are no multiple of "
                f"num_gqa_groups={num_gqa_groups}"
            )
        super().__init__()
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, num_gqa_groups
        self.kv_channels = (kv_channels,) * 2 if isinstance(kv_channels, int) else kv_channels
        self.attention_dropout = attention_dropout
        self.qkv_format, self.attention_type = qkv_format, attention_type
        self.attn_mask_type = mask_type_of(attn_mask_type)
        window_of(self.attn_mask_type, window_size)
        self.window_size = window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        self.softcap, self.softmax_type = _checked_softcap(softcap), softmax_type
        self.softmax_scale = softmax_scale or 1 / math.sqrt(self.kv_channels[0])
        self.fork = rng_fork(get_rng_state_tracker)
        self.layer_number, self.name = layer_number or 1, name
        if softmax_type == "learnable":
            shape = (num_attention_heads,)
            zeros, float32 = nn.init.zeros_, torch.float32
            self.add_parameter("softmax_offset", shape, zeros, device=device, dtype=float32)
        self.parallelize(tp_group, tp_size, None, None)
        self.finish()

    def parallel_modes(self) -> dict[str, str | None]:
        return {"softmax_offset": "column"} if self.softmax_type == "learnable" else {}

    def set_device_mesh(self, tp_mesh=None, weight_mesh=None) -> None:
        """Cuts the heads over the ranks; as of LayerNormLinear."""
        if tp_mesh is not None:
            check_heads("DotProductAttention", self.num_gqa_groups, tp_mesh.size())
        super().set_device_mesh(tp_mesh, weight_mesh)

    @property
    def ranks(self) -> int:
        """That the heads are cut over."""
        return 1 if self._qshard.parallel is None else self._qshard.parallel.ranks

    def _of_own_heads(self, x, dim):
        """This rank's heads of x, which may have all heads."""
        if self.ranks == 1 or x is None or x.dim() <= -dim - 1 or x.shape[dim] != self.num_attention_heads:
            return x
        heads = self.num_attention_heads // self.ranks
        return x.narrow(dim, self._qshard.parallel.mesh.get_local_rank() * heads, heads)

    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params=None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod=None,
        score_mod_bprop=None,
        score_mod_tensors=None,
        score_mod_bprop_tensors=None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
        thd_attention_policies=None,
        thd_attention_policy_dispatch: str = "auto",
    ) -> Tensor:
        """query_layer (..., heads, channels), key_layer and value_layer (..., groups, channels), whose
        first two dimensions are those of qkv_format; (first two, heads x channels of values) out.

        attention_mask: bool, True for what is left out: (batch, 1, 1, length) of padding masks, a tuple
            of two for cross attention; of "arbitrary" what broadcasts to (batch, heads, queries, keys).
        cu_seqlens_q, cu_seqlens_kv: (batch + 1) cumulative lengths, in place of a padding mask.
        attn_mask_type, window_size, bottom_right_diagonal, softcap, qkv_format: in place of the
            module's.
        core_attention_bias_type: "no_bias", "pre_scale_bias", "post_scale_bias" (with
            core_attention_bias, broadcastable to (batch, heads, queries, keys)), or "alibi", with
            alibi_slopes (heads,) or (batch, heads).
        qkv_layer: queries, keys and values in one tensor, whose dimension qkv_interleave_dim they
            are; kv_layer: keys and values.
        checkpoint_core_attention: compute it again in backward, and keep the inputs only; with dropout a
            tracker of get_rng_state_tracker then has get_states() and set_states().
        max_seqlen_q, max_seqlen_kv, fast_zero_fill, num_splits: change nothing.
        """
        refuse(
            "DotProductAttention",
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            inference_params=inference_params,
            pad_between_seqs=pad_between_seqs,
            fp8_output=fp8_output,
            bf16_backward=bf16_backward,
            score_mod=score_mod,
            score_mod_bprop=score_mod_bprop,
            score_mod_tensors=score_mod_tensors,
            score_mod_bprop_tensors=score_mod_bprop_tensors,
            thd_attention_policies=thd_attention_policies,
            thd_attention_policy_dispatch=thd_attention_policy_dispatch != "auto"
            and thd_attention_policy_dispatch,
        )
        layout = qkv_format or self.qkv_format
        _check_format(layout)
        if qkv_layer is not None:
            query_layer, key_layer, value_layer = qkv_layer.unbind(qkv_interleave_dim)
        elif kv_layer is not None:
            key_layer, value_layer = kv_layer.unbind(qkv_interleave_dim)
        self._check(query_layer, key_layer, value_layer)

        query, key, value = (_heads_first(x, layout) for x in (query_layer, key_layer, value_layer))
        (batch, _, queries, _), keys = query.shape, key.shape[2]
        mask_type = mask_type_of(attn_mask_type or self.attn_mask_type)
        window = window_of(mask_type, self.window_size if window_size is None else window_size)
        if bottom_right_diagonal is None:
            bottom_right_diagonal = self.bottom_right_diagonal
        bottom_right = is_bottom_right(mask_type, bottom_right_diagonal)
        paddings = None
        if "padding" in mask_type:
            is_cross = self.attention_type == "cross"
            cu_seqlens = (cu_seqlens_q, cu_seqlens_kv)
            paddings = padding_masks(attention_mask, cu_seqlens, (queries, keys), batch, is_cross)
        elif attention_mask is not None:
            attention_mask = self._of_own_heads(attention_mask, -3)
        mask = make_mask(
            mask_type, attention_mask, paddings, window, bottom_right, queries, keys, query.device
        )
        slopes = alibi_slopes
        if slopes is None and core_attention_bias_type == "alibi":
            slopes = slopes_of(self.num_attention_heads).to(query.device)
        bias = bias_of(
            core_attention_bias_type,
            self._of_own_heads(core_attention_bias, -3),
            self._of_own_heads(slopes, -1),
            (query.shape[1], queries, keys),
            (paddings, bottom_right),
            query.device,
        )
        softcap = self.softcap if softcap is None else _checked_softcap(softcap)
        arguments = (query, key, value, mask, bias, core_attention_bias_type, softcap)
        if checkpoint_core_attention:
            fork = self.fork if self.attention_dropout and self.training else None
            output = checkpointed(self._attend, *arguments, fork=fork)
        else:
            output = self._attend(*arguments)
        order = (2, 0, 1, 3) if layout == "sbhd" else (0, 2, 1, 3)
        return output.permute(order).flatten(2)

    def _attend(self, query, key, value, mask: Mask, bias, bias_type, softcap):
        """All (batch, heads, length, channels)."""
        dropout = self.attention_dropout if self.training else 0.0
        is_grouped = key.shape[1] != query.shape[1]
        is_explicit = softcap > 0 or self.softmax_type != "vanilla"
        if is_grouped and (is_explicit or bias is not None or mask.allowed is not None):
            # Kernels that take a mask have one head of keys for each of queries.
            repeats = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
            is_grouped = False
        with self.fork() if dropout and self.fork is not None else nullcontext():
            if is_explicit:
                output = self._by_scores(query, key, value, mask, bias, bias_type, softcap, dropout)
            else:
                if bias is not None:
                    bias = bias * self.softmax_scale if bias_type == "pre_scale_bias" else bias
                    bias = bias.to(query.dtype)
                allowed = _with_bias(mask, bias, query, key)
                output = F.scaled_dot_product_attention(
                    query,
                    key,
                    value,
                    attn_mask=allowed,
                    dropout_p=dropout,
                    is_causal=mask.is_causal and allowed is None,
                    scale=self.softmax_scale,
                    enable_gqa=is_grouped,
                )
        return output if mask.dead is None else output.masked_fill(mask.dead, 0)

    def _by_scores(self, query, key, value, mask, bias, bias_type, softcap, dropout):
        scores = _products(query, key)
        if bias_type == "pre_scale_bias":
            scores = scores + bias
        scores = scores * self.softmax_scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None and bias_type != "pre_scale_bias":
            scores = scores + bias
        allowed = _allowed(mask, query, key)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -math.inf)
        if self.softmax_type != "vanilla":
            offset = scores.new_zeros(scores.shape[1])
            if self.softmax_type == "learnable":
                offset = self.softmax_offset
                parallel = self._qshard.parallel
                offset = (offset if parallel is None else parallel.weight(offset)).float()
            sink = offset.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            probabilities = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            probabilities = scores.softmax(-1)
        probabilities = F.dropout(probabilities.to(value.dtype), dropout)
        return probabilities @ value

    def _check(self, query, key, value):
        heads, groups = (n // self.ranks for n in (self.num_attention_heads, self.num_gqa_groups))
        of_keys, of_values = self.kv_channels
        for name, x, shape in (
            ("query", query, (heads, of_keys)),
            ("key", key, (groups, of_keys)),
            ("value", value, (groups, of_values)),
        ):
            if x is None or x.dim() != 4 or tuple(x.shape[2:]) != shape:
                given = None if x is None else tuple(x.shape)
                raise ValueError(
                    f"qshard.nn.DotProductAttention: {name}_layer of shape {given} is not (two "
                    f"dimensions, {shape[0]} heads, {shape[1]} channels)"
                )
        if key.shape[:2] != value.shape[:2] or not query.dtype == key.dtype == value.dtype:
            raise ValueError(
                "qshard.nn.DotProductAttention: keys and values have the same length, and all one "
                f"dtype; got {query.dtype}, {key.dtype} {tuple(key.shape)} and {value.dtype} "
                f"{tuple(value.shape)}"
            )


def check_heads(module, groups, ranks):
    if groups % ranks:
        raise ValueError(
            f"qshard.nn.{module}: num_gqa_groups={groups} cannot be cut over {ranks} tensor-parallel "
            "ranks in equal parts"
        )


def _heads_first(x, layout):
    """(batch, heads, length, channels)."""
    return x.permute(1, 2, 0, 3) if layout == "sbhd" else x.transpose(1, 2)


def _products(query, key):
    """query @ key^T in fp32. In fp16 they are computed in fp32: before they are scaled they exceed it."""
    if activation_dtype(query) != torch.float16:
        return (query @ key.transpose(-1, -2)).float()
    is_autocast = autocast_dtype(query) is not None
    with torch.autocast(query.device.type, enabled=False) if is_autocast else nullcontext():
        return query.float() @ key.float().transpose(-1, -2)


def _allowed(mask, query, key):
    """The mask as a tensor, also where torch's is_causal says it."""
    if not mask.is_causal:
        return mask.allowed
    queries, keys = query.shape[2], key.shape[2]
    return torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()


def _with_bias(mask, bias, query, key):
    """What scaled_dot_product_attention takes as attn_mask."""
    if bias is None:
        return mask.allowed
    allowed = _allowed(mask, query, key)
    return bias if allowed is None else bias.masked_fill(~allowed, -math.inf)


def _check_format(layout):
    if layout == "thd":
        raise NotImplementedError(
            "qshard.nn.DotProductAttention: qkv_format='thd' is not supported; use 'bshd' or 'sbhd' "
            "with a padding mask"
        )
    check_choice("DotProductAttention", "qkv_format", layout, FORMATS)


def _checked_softcap(softcap):
    if not math.isfinite(softcap) or softcap < 0:
        raise ValueError(
            f"qshard.nn.DotProductAttention: softcap={softcap} is not a finite number of 0 or more"
        )
    return softcap
