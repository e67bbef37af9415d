"""Experts of transformers as one operator: by experts_implementation="qshard", and by fuse_."""

import copy
import pickle
import warnings

import pytest
import torch
from dist_helpers import on_ranks
from helpers import assert_same, is_quantized
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import qshard
from qshard.experts import stacks
from qshard.nn.parts.grouped import local_part

pytest.importorskip("transformers", "5.0", reason="needs transformers >= 5.0")
import qshard.integrations.transformers  # noqa: E402, F401 registers experts_implementation="qshard"
from moe_models import MODELS, make_model, tokens  # noqa: E402

GATED = [name for name in MODELS if name != "gpt_oss"]  # whose gate is clamped
BUDGET_S = 60


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


def quantized(model, recipe="float8_blockwise", **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # trained weights without a master
        qshard.quantize_(model, recipe, filter_fn=lambda *_: False, parameter_fn=is_stack, **options)
    return model


def is_stack(parameter, name):
    return parameter.dim() == 3 and name.endswith("_proj")


def experts_of(model):
    return model.model.layers[-1].mlp.experts


def step(model, seed=1, call=None):
    """Logits and gradients, by name."""
    logits = (model if call is None else call)(tokens(seed)).logits
    model.zero_grad()
    logits.square().mean().backward()
    gradients = {name: local_part(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def assert_same_step(found, expected):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert_same(value, expected[name], name)


def runs_as_one(model):
    with Seen() as seen:
        step(model)
    return "qshard::swiglu_linear_forward" in seen.names


@pytest.mark.parametrize("name, format", [
    *(("mixtral", name) for name in ("float8_tensorwise", "float8_delayed", "float8_blockwise", "mxfp8", "nvfp4")),
    *((name, "float8_blockwise") for name in GATED[1:]),
])
def test_one_operator_gives_the_bits_of_two_linears(name, format, monkeypatch):
    one, two = (quantized(make_model(name, "qshard"), format) for _ in "ab")
    found = step(one)
    assert runs_as_one(one)
    monkeypatch.setattr(stacks, "swiglu", lambda *_: None)
    assert_same_step(found, step(two))
    assert not runs_as_one(two)


@pytest.mark.parametrize("name, implementation", [
    *((name, "grouped_mm") for name in GATED), ("mixtral", "eager"), ("mixtral", "batched_mm"),
])
@pytest.mark.parametrize("order", ["before", "after"])
def test_fused_experts_are_one_operator(order, name, implementation):
    model, other = make_model(name, implementation), quantized(make_model(name, "qshard"))
    count = sum(hasattr(module, "act_fn") and "Experts" in type(module).__name__ for module in model.modules())
    assert not runs_as_one(model)
    if order == "after":
        quantized(model)
    report = qshard.fuse_(model)
    fused = [row for row in report if "Experts" in row.module]
    assert len(fused) == count and fused[0].pattern == "down_proj(swiglu of gate_up_proj) of each expert"
    if order == "before":
        quantized(model)
    assert runs_as_one(model)
    qshard.fuse_(other)  # norms and attention, as well
    assert_same_step(step(model), step(other))
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert runs_as_one(same)


def test_fused_experts_that_are_plain_are_as_they_were():
    model, plain = (make_model("mixtral", "grouped_mm") for _ in "ab")
    hidden, ids = torch.randn(6, 64), torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [1, 3], [0, 2]])
    arguments = hidden, ids, torch.rand(6, 2)
    qshard.fuse_(model)
    assert torch.equal(experts_of(model)(*arguments), experts_of(plain)(*arguments))
    qshard.dequantize_(quantized(model))
    values = experts_of(model)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(values(*arguments), experts_of(plain)(*arguments))


def test_what_is_not_a_silu_mlp_stays():
    assert not [row for row in qshard.fuse_(make_model("gpt_oss", "grouped_mm")) if "Experts" in row.module]
    model = make_model("mixtral", "grouped_mm")
    experts_of(model).act_fn = nn.GELU()
    first = model.model.layers[0].mlp.experts
    first.act_fn.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="layers.0.mlp.experts, a MixtralExperts, is left as it is: its act_fn has hooks"):
        report = qshard.fuse_(model)
    left = {row.name: row.reason for row in report.left}
    assert "experts are fused for SiLU" in left["model.layers.1.mlp.experts"]


def test_hooks_on_the_activation_that_come_later_see_its_calls():
    seen, model = [], quantized(make_model("mixtral", "grouped_mm"))
    qshard.fuse_(model)
    experts = experts_of(model)
    experts.act_fn.register_forward_hook(lambda *_: seen.append(1))
    assert not seen and (experts(torch.randn(3, 64), torch.zeros(3, 2, dtype=torch.long), torch.rand(3, 2)) is not None)
    assert seen


@pytest.mark.parametrize("order", ["before", "after"])
def test_weight_only_is_kept(order):
    model, other = make_model("mixtral", "grouped_mm"), make_model("mixtral", "qshard")
    if order == "after":
        with pytest.raises(TypeError, match="weight_only"):
            quantized(model, "nvfp4", weight_only=True)
    qshard.fuse_(model)
    quantized(model, "nvfp4", weight_only=True)
    quantized(other, "nvfp4", weight_only=True)
    qshard.fuse_(other)
    assert_same_step(step(model), step(other))


BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.takes_a_minute)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_fused_experts_compile(backend):
    torch._dynamo.reset()
    models = [quantized(make_model("mixtral", "grouped_mm")) for _ in "ab"]
    for model in models:
        qshard.fuse_(model)
    compiled = torch.compile(models[1], fullgraph=True, backend=backend)
    torch.testing.assert_close(step(models[1], call=compiled), step(models[0]))


# Inductor leaves out roundings to float16 between operators that it fuses (emulate_precision_casts of
# https://github.com/pytorch/pytorch/blob/v2.11.0/torch/_inductor/config.py).
@pytest.mark.only_where(lambda backend, dtype: backend == "aot_eager" or dtype is torch.float32)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name, keep_master, dtype", [
    ("mixtral", True, torch.float32), ("mixtral", False, torch.float16), ("gpt_oss", False, torch.float32),
])
def test_compiled_grouped_mm_of_other_dtypes_is_native(name, keep_master, dtype, backend):
    """transformers calls an operator of its own there, which loops over experts on the host."""
    torch._dynamo.reset()
    models = [quantized(make_model(name, "grouped_mm").to(dtype), keep_master=keep_master) for _ in "ab"]
    compiled = torch.compile(models[1], fullgraph=True, backend=backend)
    with qshard.trace_fallbacks() as read:
        found = step(models[1], call=compiled)
    assert not read
    torch.testing.assert_close(found, step(models[0]))
    assert any(map(is_quantized, models[1].parameters()))


def test_operands_that_are_no_experts_are_left_to_transformers():
    op, q = torch.ops.transformers.grouped_mm_fallback, qshard.ops.quantize(torch.randn(2, 64, 64), "mxfp8")
    x, ends = torch.randn(8, 64), torch.tensor([3, 8])
    value = qshard.ops.dequantize(q)
    expected = torch.cat([x[:3] @ value[0].t(), x[3:] @ value[1].t()])
    torch.testing.assert_close(op(x, q.mT, ends), expected)
    plain = torch.randn(2, 64, 32)
    row = qshard.ops.quantize(x, "mxfp8")
    torch.testing.assert_close(op(row, plain, ends), op(qshard.ops.dequantize(row), plain, ends))


@on_ranks(2, devices=("cpu",))
def test_fused_experts_under_fsdp2():
    from torch.distributed.fsdp import fully_shard

    models = [quantized(make_model("mixtral", name)) for name in ("grouped_mm", "qshard")]
    for model in models:
        qshard.fuse_(model)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    assert_same_step(*map(step, models))
