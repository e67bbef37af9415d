"""The Llama of examples/, written in other ways, with the same initial values.

`LlamaOfModules` has the blocks that TransformerEngine's users write, of one qkv weight, and one of gate and up:
6 parameters a block for 9. The blocks are qshard.nn's, or TransformerEngine's own, which take the same arguments.
Under tensor parallelism tokens come first, which is the dimension that the modules cut; gate and up are two
parameters, and the fused weight's rows are by group.

`LlamaWithComplexRotary` turns queries and keys by complex numbers, as Meta's Llama and torchtitan do."""

import contextlib
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import qshard
from qshard import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from llama import Attention, Block, Llama, LlamaConfig  # noqa: E402


class LlamaOfModules(Llama):
    """library: the module that has TransformerLayer, RMSNorm and RotaryPositionEmbedding. of_layer: further
    arguments of TransformerLayer."""

    def __init__(
        self, config: LlamaConfig, is_tensor_parallel: bool = False, library=nn, **of_layer
    ):
        super().__init__(config)
        self.is_tensor_parallel = is_tensor_parallel
        self.autocast = contextlib.nullcontext  # makes the context that blocks run in
        for i, block in enumerate(self.layers):
            self.layers[i] = layer_of(block, config, is_tensor_parallel, library, **of_layer)
        if not is_tensor_parallel:  # else torch's SequenceParallel is about the norm
            self.norm = library.RMSNorm(config.dim, eps=self.norm.eps)
        self.rotary = library.RotaryPositionEmbedding(
            config.dim // config.heads, rotary_base=config.rope_base
        )

    def forward(self, tokens, loss=None):
        angles = self.rotary(tokens.shape[1])
        x = self.embedding(tokens)
        x = x.transpose(0, 1).contiguous() if self.is_tensor_parallel else x
        with self.autocast():
            for layer in self.layers:
                x = layer(x, rotary_pos_emb=angles)
        x = x.transpose(0, 1) if self.is_tensor_parallel else x
        x = self.norm(x)
        return self.head(x) if loss is None else loss(x, self.head.weight)


@torch.no_grad()
def layer_of(
    block: Block, config: LlamaConfig, is_tensor_parallel: bool, library, **arguments
) -> torch.nn.Module:
    layer = library.TransformerLayer(
        config.dim,
        config.hidden,
        config.heads,
        num_gqa_groups=config.kv_heads,
        layernorm_epsilon=block.ffn_norm.eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        qkv_weight_interleaved=is_tensor_parallel,
        set_parallel_mode=is_tensor_parallel,
        sequence_parallel=is_tensor_parallel,
        bias=False,
        normalization="RMSNorm",
        activation="swiglu",
        attn_input_format="sbhd" if is_tensor_parallel else "bshd",
        **arguments,
    )
    attention, ffn = block.attention, block.ffn
    projected = [linear.weight for linear in (attention.wq, attention.wk, attention.wv)]
    if is_tensor_parallel:
        projected = [w.view(config.kv_heads, -1, config.dim) for w in projected]
        projected = [torch.cat(projected, 1).flatten(0, 1)]
    qkv, mlp = layer.self_attention.layernorm_qkv, layer.layernorm_mlp
    for parameter, parts in (
        (qkv.layer_norm_weight, [block.attention_norm.weight]),
        (qkv.weight, projected),
        (layer.self_attention.proj.weight, [attention.wo.weight]),
        (mlp.layer_norm_weight, [block.ffn_norm.weight]),
        (mlp.fc1_weight, [ffn.gate.weight, ffn.up.weight]),
        (mlp.fc2_weight, [ffn.down.weight]),
    ):
        parameter.copy_(torch.cat(parts))
    return layer


def turn_complex(query, key, freqs_cis):
    """Turns (batch, positions, heads, channels) by complex64 (positions, channels / 2), as Meta's Llama and
    torchtitan write it."""
    freqs = freqs_cis[: query.shape[1]][None, :, None]
    pairs = (torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) for x in (query, key))
    return tuple(torch.view_as_real(pair * freqs).flatten(3).type_as(query) for pair in pairs)


class LlamaWithComplexRotary(Llama):
    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        half = config.dim // config.heads // 2
        rotary = ComplexRotary(torch.complex(self.cos[:, :half], self.sin[:, :half]))
        for block in self.layers:
            attention = AttentionWithComplexRotary(config, rotary)
            attention.load_state_dict(block.attention.state_dict())
            block.attention = attention


class ComplexRotary(torch.nn.Module):
    """cache: freqs_cis of turn_complex."""

    def __init__(self, cache):
        super().__init__()
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, query, key, positions=None):
        return turn_complex(query, key, self.cache)


qshard.fuse.register(ComplexRotary, qshard.fuse.RotaryPair())


class AttentionWithComplexRotary(Attention):
    def __init__(self, config: LlamaConfig, rotary: ComplexRotary):
        super().__init__(config)
        self.rotary = rotary

    def forward(self, x, cos, sin):
        projected = [linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.wq, self.wk, self.wv)]
        q, k = self.rotary(*projected[:2])
        q, k, v = (part.transpose(1, 2) for part in (q, k, projected[2]))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))
