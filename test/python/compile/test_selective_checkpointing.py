"""Selective activation checkpointing: no product of a quantized linear runs again, and no bit moves."""

import contextlib
import functools
import re

import pytest
import torch
import torch.nn.functional as F
from dist_helpers import device, on_ranks
from models.fsdp2 import build
from models.training import adamw, train
from models.weights import full_value
from nn_helpers import RECIPES, assert_bits, randomize
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import qshard
from qshard.activation_checkpointing import PRODUCTS

BUDGET_S = 90
DIM, ROWS = 64, 16
aten, ops = torch.ops.aten, torch.ops.qshard
CASES = RECIPES | {
    # Hadamard transforms and stochastic rounding of gradients, on a CPU, too.
    "nvfp4[emulate]": qshard.NVFP4BlockScaling(emulate=True),
    "float8_blockwise[emulate]": qshard.Float8BlockScaling(emulate=True),
}
formats = pytest.mark.parametrize("recipe", CASES.values(), ids=CASES)


class Runs(TorchDispatchMode):
    """Counts the calls of operators that run."""

    def __init__(self, operators=PRODUCTS):
        super().__init__()
        self.operators, self.count = operators, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in self.operators
        return func(*args, **(kwargs or {}))


class Experts(nn.Module):
    """swiglu_experts, and grouped_linear."""

    def __init__(self):
        super().__init__()
        self.experts = qshard.nn.GroupedExperts(DIM, 96, 4)
        self.last = qshard.nn.GroupedLinear(4, DIM, DIM, bias=False)

    def forward(self, x):
        x = F.gelu(x.flatten(0, -2))
        y = self.experts(x, torch.tensor([x.shape[0] - 6, 0, 5, 1]))
        return self.last(F.gelu(y), [x.shape[0] - 6, 0, 5, 1])


class Functions(nn.Module):
    """What operators make of parameters, without our modules."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.empty(DIM, DIM) for _ in range(4))
        self.norm = nn.Parameter(torch.empty(DIM))

    def forward(self, x):
        one, gate, up, down = self.weights
        (y,) = ops.norm_linear(x, self.norm, None, [one], eps=1e-5, rms=True)
        name = ops.format(gate) if not torch.compiler.is_compiling() else None
        y = ops.swiglu_mlp(F.gelu(y), gate, up, down, format=name, down_format=name, residual=y)
        return F.linear(torch.tanh(y), one)


MODULES = {
    "linears": lambda: nn.Sequential(
        nn.Linear(DIM, 96), nn.GELU(), nn.Linear(96, DIM, bias=False), nn.Dropout(0.2), nn.Linear(DIM, DIM)
    ),
    "norms": lambda: nn.Sequential(
        qshard.nn.LayerNormLinear(DIM, DIM), qshard.nn.LayerNormMLP(DIM, 96, activation="swiglu")
    ),
    "layer": lambda: qshard.nn.TransformerLayer(
        DIM, 96, 4, normalization="RMSNorm", activation="swiglu", hidden_dropout=0.1, attention_dropout=0.0
    ),
    "experts": Experts,
    "functions": Functions,
}  # fmt: skip


def make(name, recipe, **options):
    torch.manual_seed(0)
    model = randomize(MODULES[name]())
    chosen = (lambda parameter, _: parameter.dim() == 2) if name == "functions" else (lambda *_: False)
    if options.get("weights") != "dynamic":
        options["parameter_fn"] = chosen
    return qshard.quantize_(nn.Sequential(model), recipe, filter_fn=lambda *_: True, **options)


def steps(model, contexts=None, count=2):
    """(losses, gradients, parameters, products that ran) of steps, with activation checkpointing or without."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    results = []
    with Runs() as runs:
        for step in range(count):
            torch.manual_seed(step + 1)
            x = torch.randn(ROWS, 2, DIM, requires_grad=True)
            if contexts is None:
                y = model(x)
            else:
                y = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
            y.square().mean().backward()
            results += [y.detach().clone(), x.grad, *(p.grad.clone() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
    return results + [p.detach() * 1 for p in model.parameters()], runs.count


def contexts_of(**options):
    return functools.partial(create_selective_checkpoint_contexts, qshard.selective_policy(**options))


# ---------------------------------------------------------------------------- bits, and what runs


@pytest.mark.each_value
@pytest.mark.parametrize("name", MODULES)
@formats
def test_no_product_runs_again_and_no_bit_moves(recipe, name):
    expected, once = steps(make(name, recipe))
    assert once > 0
    got, count = steps(make(name, recipe), contexts_of())
    assert_bits(got, expected)
    assert count == once
    # Without a policy all of them run again, but for those after the last tensor that backward asks for.
    _, without = steps(make(name, recipe), torch.utils.checkpoint.noop_context_fn)
    assert without > once


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("format", ["float8_delayed", "mxfp8_1x32", "nvfp4[emulate]"])
def test_every_second_product_runs_again(format, name):
    expected, once = steps(make(name, CASES[format]))
    contexts = qshard.selective_context_fn(every_second_matmul=True)
    got, count = steps(make(name, CASES[format]), contexts)
    assert_bits(got, expected)
    assert once < count <= once + once // 2


@pytest.mark.parametrize(
    "recipe, options",
    [
        ("nvfp4", dict(keep_master=False, stochastic_rounding=True)),
        ("mxfp8", dict(keep_master=False)),
        ("float8_blockwise", dict(weight_only=True)),
        ("float8_delayed", dict(weights="dynamic")),
        ("float8_blockwise", dict(weights="dynamic")),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:qshard.quantize_")
def test_ways_to_keep_weights(recipe, options):
    expected, once = steps(make("linears", recipe, **options), count=3)
    for contexts in (contexts_of(), qshard.selective_context_fn(every_second_matmul=True)):
        got, count = steps(make("linears", recipe, **options), contexts, count=3)
        assert_bits(got, expected)
    assert count > once


@pytest.mark.parametrize("every_second", [False, True])
def test_regions_of_an_odd_number_of_products_share_contexts(every_second):
    """Three linears each: a count that went on from region to region would hand out outputs of other linears."""

    def blocks():
        torch.manual_seed(0)
        linears = [nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3)), nn.GELU()) for _ in range(3)]
        return qshard.quantize_(nn.Sequential(*linears), "float8_blockwise")

    def run(model, contexts):
        x = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))
        for block in model:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts) if contexts else block(x)
        with Runs() as runs:
            x.sum().backward()
        return [p.grad for p in model.parameters()], runs.count

    contexts = qshard.selective_context_fn(every_second_matmul=every_second)
    expected, _ = run(blocks(), None)
    got, again = run(blocks(), contexts)
    assert_bits(got, expected)
    assert again == (3 if every_second else 0)


MIXED = ["float8_tensorwise", "float8_delayed[history=3]", "float8_blockwise", "mxfp8_1x32", "nvfp4"]


@pytest.mark.each_value
@pytest.mark.parametrize("keep_master", [True, False])
@pytest.mark.parametrize("format", MIXED)
@on_ranks(1, 2)
def test_under_fsdp2(format, keep_master):
    results = []
    for options in (None, {}, dict(every_second_matmul=True)):

        def wrap(model, options=options):
            if options is None:
                return
            contexts = qshard.selective_context_fn(**options)
            for number, block in enumerate(model.blocks):
                model.blocks[number] = checkpoint_wrapper(block, context_fn=contexts)

        model = build(format, keep_master=keep_master, prepare=wrap)
        with Runs() if device().type == "cpu" else contextlib.nullcontext(Runs()) as runs:
            losses = train(model, adamw(model), microbatches=2)
        results.append((losses, [full_value(p) for p in model.parameters()], runs.count))
    (losses, values, once), *others = results
    for number, (other_losses, other_values, count) in enumerate(others):
        assert other_losses == losses
        assert_bits(other_values, values)
        if device().type == "cpu":  # the engine's threads of GPUs have modes of their own
            assert count == once + number * 2 * 6  # `down` of two blocks, in six microbatches


# --------------------------------------------------------------------------------- torch.compile


@pytest.mark.parametrize(
    "backend, contexts",
    [("aot_eager", "policy"), ("aot_eager", "contexts"), ("aot_eager", "every second"), ("inductor", "policy")],
)
def test_compiled_regions(backend, contexts):
    torch._dynamo.reset()
    made = {
        "policy": contexts_of(),
        "contexts": qshard.selective_context_fn(),
        "every second": qshard.selective_context_fn(every_second_matmul=True),
    }[contexts]
    module = qshard.quantize_(
        nn.Sequential(nn.Linear(DIM, 96), nn.GELU(), nn.Linear(96, DIM), nn.GELU()),
        qshard.Float8BlockScaling(emulate=True),
    )

    @functools.partial(torch.compile, fullgraph=True, backend=backend)
    def run(x):
        return checkpoint(module, x, use_reentrant=False, context_fn=made)

    x = torch.randn(ROWS, DIM, requires_grad=True)
    inputs = x, *module.parameters()
    expected = torch.autograd.grad(module(x).square().sum(), inputs)
    before = forwards()
    got = torch.autograd.grad(run(x).square().sum(), inputs)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert forwards() - before == (3 if contexts == "every second" else 2)


def forwards():
    """Linears of `float8_blockwise[emulate]` that were computed in this process; experts have lines of their own."""
    lines = [row for row in ops.backend_report().splitlines() if "blockwise[emulate] forward" in row]
    return sum(int(re.search(r"(\d+) times", line)[1]) for line in lines)


# ------------------------------------------------------------------------------------ the policy


def decision(policy, op, *args, **kwargs):
    return policy(SelectiveCheckpointContext(is_recompute=False), op, *args, **kwargs)


def test_what_is_saved():
    policy = qshard.selective_policy()
    saved = [*PRODUCTS, ops.quantize_input.default, aten.mm.default, aten.addmm.default, aten.topk.default,
             aten._scaled_dot_product_flash_attention.default, torch.ops.higher_order.flex_attention,
             torch.ops._c10d_functional.reduce_scatter_tensor.default]  # fmt: skip
    other = [aten.gelu.default, aten.bmm.default, ops._normalize.default, ops.rotary_embedding.default,
             ops._quantize_kept_input.default, torch.ops._c10d_functional.all_gather_into_tensor.default]  # fmt: skip
    assert all(decision(policy, op) is CheckpointPolicy.MUST_SAVE for op in saved)
    assert all(decision(policy, op) is CheckpointPolicy.PREFER_RECOMPUTE for op in other)


def test_every_product_of_ours_is_listed():
    """An operator that computes a linear and is no backward, nor one that calls another below autograd."""
    schemas = [schema.name for schema in torch._C._jit_get_all_schemas()]
    forwards = {name for name in schemas if name.startswith("qshard::") and name.endswith("_forward")}
    assert forwards == {op._schema.name for op in PRODUCTS}


def test_copies_to_the_host_are_saved():
    policy = qshard.selective_policy()
    here = torch.empty(2)
    to_copy = aten._to_copy.default
    assert decision(policy, to_copy, here, device="cpu") is CheckpointPolicy.PREFER_RECOMPUTE
    assert decision(policy, to_copy, here, dtype=torch.int64) is CheckpointPolicy.PREFER_RECOMPUTE

    class OnGpu:
        device = torch.device("cuda", 0)

    assert decision(policy, to_copy, OnGpu(), device=torch.device("cpu")) is CheckpointPolicy.MUST_SAVE
    assert decision(policy, to_copy, OnGpu(), device="cuda") is CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("function", [qshard.selective_policy, qshard.selective_context_fn])
def test_operators_of_ones_own(function):
    policies = []
    function(save=[aten.bmm.default], recompute=[ops.linear_forward.default])  # lists, too
    if function is qshard.selective_policy:
        policies.append(function(save=iter([aten.bmm.default]), recompute=iter([ops.linear_forward.default])))
    else:
        forward, _ = function(
            save=iter([aten.bmm.default]), recompute=iter([ops.linear_forward.default]), every_second_matmul=True
        )()
        policies.append(forward.policy_fn)
    for policy in policies:
        assert decision(policy, aten.bmm.default) is CheckpointPolicy.MUST_SAVE
        assert decision(policy, ops.linear_forward.default) is CheckpointPolicy.PREFER_RECOMPUTE
    with pytest.raises(TypeError, match=rf"qshard.{function.__name__}: save takes .* torch.ops.aten.bmm.default, not"):
        function(save=[aten.bmm])
    with pytest.raises(TypeError, match="recompute takes overloads of operators.*not 'aten::bmm'"):
        function(recompute=["aten::bmm"])


def test_what_one_asks_for_is_saved_whatever_its_number():
    contexts = qshard.selective_context_fn(every_second_matmul=True, save=[ops.linear_forward.default])
    _, once = steps(make("linears", "nvfp4"))
    assert steps(make("linears", "nvfp4"), contexts)[1] == once
