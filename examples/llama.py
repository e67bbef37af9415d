"""A small Llama: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU, stock nn.Linear."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel


@dataclass
class LlamaConfig:
    vocab: int = 256  # bytes
    dim: int = 256
    layers: int = 3
    heads: int = 8
    kv_heads: int = 2
    hidden: int = 704
    max_seq_len: int = 128
    rope_base: float = 10_000.0


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.wq = nn.Linear(config.dim, config.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * self.head_dim, config.dim, bias=False)
        self.rotary = Rotary()

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        # Tensor parallelism leaves a rank some of the heads.
        q = self.wq(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        cos, sin = cos.float(), sin.float()  # under mixed precision FSDP2 casts what a block is given
        q, k = self.rotary(q, cos, sin), self.rotary(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.ffn = FeedForward(config)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)

        head_dim = config.dim // config.heads
        frequency = config.rope_base ** (-torch.arange(0, head_dim, 2) / head_dim)
        angle = torch.outer(torch.arange(config.max_seq_len), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Normal weights, those that add to the residual stream scaled down with depth."""
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                residual = name.endswith(("wo", "down"))
                module.weight.normal_(std=0.02 / (2 * len(self.layers)) ** 0.5 if residual else 0.02)

    def forward(self, tokens, loss=None):
        """Logits; or what `loss` makes of the head's input and weight, while FSDP2 has gathered that."""
        length = tokens.shape[1]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        x = self.norm(x)
        return self.head(x) if loss is None else loss(x, self.head.weight)


def tensor_parallel_plan(layers: int, styles, is_loss_parallel: bool = False) -> dict:
    """For parallelize_module of a Llama, with sequence parallelism between its linears. styles: the module
    that has ColwiseParallel, RowwiseParallel and PrepareModuleInput, qshard.tensor_parallel or torch's.
    is_loss_parallel: logits are left cut by vocabulary, DTensors for torch's loss_parallel."""
    gathered = {
        "attention": ((Shard(1), None, None), (Replicate(), None, None)),  # x, cos, sin
        "ffn": ((Shard(1),), (Replicate(),)),
    }
    plan = {
        "embedding": styles.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": styles.ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=Shard(-1) if is_loss_parallel else Replicate(),
            use_local_output=not is_loss_parallel,
        ),
    }
    for i in range(layers):
        for name, (given, wanted) in gathered.items():
            plan[f"layers.{i}.{name}_norm"] = SequenceParallel()
            plan[f"layers.{i}.{name}"] = styles.PrepareModuleInput(
                input_layouts=given, desired_input_layouts=wanted
            )
        for name in ("attention.wq", "attention.wk", "attention.wv", "ffn.gate", "ffn.up"):
            plan[f"layers.{i}.{name}"] = styles.ColwiseParallel()
        for name in ("attention.wo", "ffn.down"):
            plan[f"layers.{i}.{name}"] = styles.RowwiseParallel(output_layouts=Shard(1))
    return plan


class Rotary(nn.Module):
    """Rotary position embedding, computed in float32 as cos and sin are. x is (batch, heads, length,
    head_dim), cos and sin (length, head_dim), with the same angle for channels half of them apart."""

    def forward(self, x, cos, sin):
        half = x.shape[-1] // 2
        cos, sin = cos[:, :half], sin[:, :half]
        if torch.compiler.is_compiling():  # fuses what follows
            even, odd = x.float().chunk(2, dim=-1)
            return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1).to(x.dtype)
        return Rotation.apply(x, cos, sin)


class Rotation(torch.autograd.Function):
    """`Rotary` in few passes: of bf16, 14 bytes per element each way. The plain formula and
    its autograd take 48 and 56, a copy to the linear's layout included."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        cos, sin = (part.unsqueeze(1) for part in ctx.saved_tensors)
        # In the memory layout of a linear's output, so that none needs to copy it.
        return turn(grad.transpose(1, 2), cos, sin, -1).transpose(1, 2), None, None


def turn(x, cos, sin, sign):
    """x turned by float32 angles, or back with sign -1; contiguous. Operands are converted inside the
    kernels, so that float32 only appears between the two of each half."""
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (even, odd), (out_even, out_odd) = x.chunk(2, dim=-1), result.chunk(2, dim=-1)
    torch.addcmul(even * cos, odd, sin, value=-sign, out=out_even)
    torch.addcmul(odd * cos, even, sin, value=sign, out=out_odd)
    return result
