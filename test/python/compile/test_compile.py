"""torch.compile: fullgraph per block, with and without FSDP2's hooks around it."""

import pytest
import torch
import torch._inductor.compile_fx
import torch._inductor.utils
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import qshard

BUDGET_S = 75  # Inductor's first compilation takes 30 s
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


VIEWS = {
    "stock linear": lambda x, w: nn.functional.linear(x, w),
    "transposed": lambda x, w: x @ w.t(),
    "there and back": lambda x, w: x @ w.t() @ w,
    "batched": lambda x, w: torch.bmm(x[None], w.view(1, 48, 32).transpose(1, 2)),
    "einsum": lambda x, w: torch.einsum("bi,oi->bo", x, w),
    "rows": lambda x, w: x @ w[16:32].t(),
    "columns": lambda x, w: x[:, :16] @ w[:, 16:].t(),
    "dequantized": lambda x, w: x @ torch.ops.qshard.dequantize(w).t(),
}


@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_weights_under_inductor(view, keep_master):
    """Products read codes, as in eager mode, with an address and without."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    values, x = torch.randn(48, 32, generator=generator), torch.randn(5, 32, generator=generator)
    weight = nn.Parameter(torch.ops.qshard.quantize(values, "float8_blockwise", keep_master=keep_master))
    outcomes = []
    for run in (VIEWS[view], torch.compile(VIEWS[view], fullgraph=True)):
        weight.grad, input = None, x.clone().requires_grad_()
        output = run(input, weight)
        output.sum().backward()
        outcomes.append((output, input.grad, weight.grad))
    for eager, compiled in zip(*outcomes):
        assert torch.equal(eager, compiled)


def test_code_compiled_of_a_plain_weight_serves_a_quantized_one(tmp_path):
    """torch's caches of compiled code know a weight by its shape and dtype."""
    run = VIEWS["transposed"]
    x, values = torch.randn(5, 32), torch.randn(48, 32)
    with torch._inductor.utils.fresh_cache():
        torch._dynamo.reset()
        assert torch.equal(torch.compile(run)(x, values), run(x, values))
        torch._dynamo.reset()  # of this process, but not what lies on disk
        quantized = torch.ops.qshard.quantize(values, "float8_blockwise", keep_master=True)
        assert torch.equal(torch.compile(run)(x, quantized), run(x, quantized))
    assert not torch.equal(run(x, quantized), run(x, values))


class LinearOfAFramework(nn.Linear):
    """As all linears of torchtitan 0.3 are."""


def test_subclasses_of_linear_under_inductor():
    torch._dynamo.reset()
    model = nn.Sequential(LinearOfAFramework(32, 48), LinearOfAFramework(48, 32))
    qshard.quantize_(model, RECIPES[1])
    x = torch.randn(5, 32)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return torch._inductor.compile_fx.compile_fx(graph, inputs)

    assert torch.equal(torch.compile(model, fullgraph=True, backend=backend)(x), model(x))
    assert graphs[0].count("torch.ops.qshard.linear.default") == 2


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
