"""The Llama of examples/ with the blocks that TransformerEngine's users write, of one qkv weight, and one of
gate and up: 6 parameters a block for 9. Values are those of the stock modules."""

import sys
from pathlib import Path

import torch

from qshard import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from llama import Block, Llama, LlamaConfig  # noqa: E402


class LlamaOfModules(Llama):
    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        for i, block in enumerate(self.layers):
            self.layers[i] = layer_of(block, config)
        norm = nn.RMSNorm(config.dim, eps=self.norm.eps)
        norm.load_state_dict(self.norm.state_dict())
        self.norm = norm
        self.rotary = nn.RotaryPositionEmbedding(
            config.dim // config.heads, rotary_base=config.rope_base
        )

    def forward(self, tokens):
        angles = self.rotary(tokens.shape[1])
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles)
        return self.head(self.norm(x))


@torch.no_grad()
def layer_of(block: Block, config: LlamaConfig) -> nn.TransformerLayer:
    layer = nn.TransformerLayer(
        config.dim,
        config.hidden,
        config.heads,
        num_gqa_groups=config.kv_heads,
        layernorm_epsilon=block.ffn_norm.eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        qkv_weight_interleaved=False,
        bias=False,
        normalization="RMSNorm",
        activation="swiglu",
        attn_input_format="bshd",
    )
    attention, ffn = block.attention, block.ffn
    qkv, mlp = layer.self_attention.layernorm_qkv, layer.layernorm_mlp
    for parameter, parts in (
        (qkv.layer_norm_weight, [block.attention_norm]),
        (qkv.weight, [attention.wq, attention.wk, attention.wv]),
        (layer.self_attention.proj.weight, [attention.wo]),
        (mlp.layer_norm_weight, [block.ffn_norm]),
        (mlp.fc1_weight, [ffn.gate, ffn.up]),
        (mlp.fc2_weight, [ffn.down]),
    ):
        parameter.copy_(torch.cat([part.weight for part in parts]))
    return layer
