"""torch.compile: fullgraph per block, with and without FSDP2's hooks around it."""

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import qshard

RECIPES = (qshard.Float8CurrentScaling(), qshard.Float8BlockScaling(), qshard.DelayedScaling())


class Block(nn.Module):
    def __init__(self, dim=64, activation_checkpointing=False):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim, bias=False)
        self.activation_checkpointing = activation_checkpointing

    def mlp(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x):
        if self.activation_checkpointing:
            return checkpoint(self.mlp, x, use_reentrant=False)
        return self.mlp(x)


def train(block, steps=3):
    """Losses and final weights of a few AdamW steps on fixed data."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2, fused=True)
    losses = []
    for _ in range(steps):
        x = torch.randn(2, 8, 64, generator=generator)
        loss = (block(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make(recipe, weights="quantized", **kwargs):
    torch.manual_seed(0)
    return qshard.quantize_(Block(**kwargs), recipe, weights=weights)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.format)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_fullgraph_equals_eager(recipe, backend):
    torch._dynamo.reset()
    eager = train(make(recipe))
    block = make(recipe)
    block.compile(fullgraph=True, backend=backend)
    assert train(block) == pytest.approx(eager, rel=1e-4)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.format)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_weights_that_stay_plain(recipe, checkpointed):
    torch._dynamo.reset()
    eager = train(make(recipe, activation_checkpointing=checkpointed))
    block = make(recipe, "dynamic", activation_checkpointing=checkpointed)
    block.compile(fullgraph=True, backend="aot_eager")
    assert train(block) == pytest.approx(eager, rel=1e-4)


def test_fullgraph_with_activation_checkpointing():
    torch._dynamo.reset()
    eager = train(make(RECIPES[1]))
    block = make(RECIPES[1], activation_checkpointing=True)
    block.compile(fullgraph=True, backend="aot_eager")
    assert train(block) == pytest.approx(eager, rel=1e-4)


def test_stock_linear_raises_under_inductor_instead_of_reading_bytes():
    torch._dynamo.reset()
    linear = nn.Linear(16, 16)
    linear.weight = nn.Parameter(torch.ops.qshard.quantize(linear.weight, "float8_blockwise"))
    compiled = torch.compile(linear, backend="inductor")
    with pytest.raises(Exception, match="quantized|data pointer"):
        compiled(torch.randn(4, 16))


def test_compiled_fused_optimizer_step_equals_eager():
    torch._dynamo.reset()
    eager, compiled = make(RECIPES[1]), make(RECIPES[1])
    for block, wrap in ((eager, lambda f: f), (compiled, torch.compile)):
        optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2, fused=True)
        for p in block.parameters():
            p.grad = torch.ones(p.shape)
        step = wrap(optimizer.step)
        step()
    for a, b in zip(eager.parameters(), compiled.parameters()):
        assert torch.equal(a + 0, b + 0)
        if qshard.is_quantized(a):
            codes = [torch.ops.qshard.codes(t.detach()).view(torch.uint8) for t in (a, b)]
            assert torch.equal(*codes)
