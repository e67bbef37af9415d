"""What whole blocks keep between forward and backward, against plain torch's: LoRA over a fused frozen base, and
TransformerLayer."""

import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import FORMATS
from nn_helpers import RECIPES
from test_saved_operands import draw, kept_by

import qshard
from qshard import nn

sys.path.append(str(Path(__file__).parents[3] / "examples"))
from llama import Block, LlamaConfig  # noqa: E402

CONFIG = LlamaConfig(dim=64, layers=1, heads=4, kv_heads=2, hidden=96, max_seq_len=16)


class Adapted(torch.nn.Module):
    """A frozen linear and its low-rank update."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapt(block, where):
    block.requires_grad_(False)
    for parent, names in where.items():
        module = getattr(block, parent)
        for name in names:
            setattr(module, name, Adapted(getattr(module, name)))
    return block


ADAPTED = {
    "queries and values": {"attention": ("wq", "wv")},
    "down": {"ffn": ("down",)},
    "all": {"attention": ("wq", "wk", "wv", "wo"), "ffn": ("gate", "up", "down")},
}


def owned_by(module):
    """Parameters, and the state by which delayed scaling quantizes weights that stay plain."""
    linears = [m for m in module.modules() if isinstance(m, torch.nn.Linear)]
    state = [getattr(m, f"weight_{name}", None) for m in linears for name in ("amax_history", "scaling_amax")]
    return [*module.parameters(), *(s for s in state if s is not None)]


@pytest.mark.pairwise
@pytest.mark.parametrize("where", ADAPTED)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("weights", ["quantized", "weight only", "dynamic"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_lora_keeps_no_more_than_plain_torch(format, fused, weights, compiled, where):
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = adapt(Block(CONFIG), ADAPTED[where])
    block = copy.deepcopy(plain)
    options = {"weights": "dynamic"} if weights == "dynamic" else {"weight_only": weights == "weight only"}
    is_base = lambda module, _: min(module.weight.shape) > 4  # noqa: E731
    qshard.quantize_(block, RECIPES[format], filter_fn=is_base, **options)
    if fused:
        qshard.fuse_(block)
    angles = torch.outer(torch.arange(8), torch.rand(8)).repeat(1, 2)
    x = draw(2, 8, 64)
    bytes_kept = []
    for module in (block, plain):
        run = torch.compile(module, backend="aot_eager") if compiled else module
        kept, _, y = kept_by(lambda: run(x, angles.cos(), angles.sin()), owned_by(module))  # noqa: B023
        y.square().sum().backward()
        bytes_kept.append(kept)
    assert bytes_kept[0] <= bytes_kept[1]


class PlainLayer(torch.nn.Module):
    """nn.TransformerLayer as plain torch writes it, without dropout and biases."""

    def __init__(self):
        super().__init__()
        linear = lambda *sizes: torch.nn.Linear(*sizes, bias=False)  # noqa: E731
        self.norm1, self.norm2 = torch.nn.RMSNorm(64), torch.nn.RMSNorm(64)
        self.qkv, self.proj = linear(64, 192), linear(64, 64)
        self.gate_up, self.down = linear(64, 192), linear(96, 64)

    def forward(self, x):  # (length, batch, 64)
        q, k, v = (t.unflatten(-1, (4, 16)).permute(1, 2, 0, 3) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(out.permute(2, 0, 1, 3).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


@pytest.mark.parametrize("trained", ["all", "nothing", "norms"])
@pytest.mark.parametrize("format", FORMATS)
def test_transformer_layer_keeps_no_more_than_plain_torch(format, trained):
    layer = nn.TransformerLayer(
        64, 96, 4, hidden_dropout=0, attention_dropout=0, bias=False, normalization="RMSNorm", activation="swiglu"
    )
    qshard.quantize_(layer, RECIPES[format])
    plain = PlainLayer()
    bytes_kept = []
    for module in (layer, plain):
        module.requires_grad_(trained == "all")
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(trained == "all" or (trained == "norms" and parameter.dim() == 1))
        x = draw(32, 2, 64).requires_grad_(trained == "nothing")
        kept, _, y = kept_by(lambda: module(x), list(module.parameters()))  # noqa: B023
        y.square().sum().backward()
        bytes_kept.append(kept)
    assert bytes_kept[0] <= bytes_kept[1]
