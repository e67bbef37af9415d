"""What qshard remembers of a module is one object in it, and nothing of a user's is taken for ours."""

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import qshard

ops = torch.ops.qshard
FILE = Path(__file__).with_name("files") / "before_module_state.pt"
RECIPES = {
    "blockwise": (qshard.Float8BlockScaling(), {}),
    "delayed": (qshard.DelayedScaling(amax_history_len=4), {}),
    "without a master": (
        qshard.NVFP4BlockScaling(), {"keep_master": False, "stochastic_rounding": True},
    ),
    "dynamic": (qshard.DelayedScaling(amax_history_len=4), {"weights": "dynamic"}),
}  # fmt: skip
ANY_RECIPE = pytest.mark.parametrize("recipe", RECIPES)


def quantize(model, recipe):
    recipe, options = RECIPES[recipe]
    return qshard.quantize_(model, recipe, filter_fn=lambda *_: True, **options)


class Halving(nn.Linear):
    """A user's class, with attributes of names that qshard has used."""

    def __init__(self, *args):
        super().__init__(*args)
        self.dynamic = 0.5

    def forward(self, x):
        return super().forward(x) * self.dynamic


class PassesOn(nn.Module):
    """A wrapper such as PEFT's: what it does not have, the wrapped module has."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.inner(x)


WRAPPERS = {
    "passes on": PassesOn,
    "checkpointed": checkpoint_wrapper,
    "compiled": lambda module: torch.compile(module, backend="aot_eager"),
}


def contents(module):
    """All that a module itself holds, hooks too; its parameters as their types."""
    held = {}
    for name, value in module.__dict__.items():
        held[name] = dict(value) if isinstance(value, dict) else value
    held["_parameters"] = {n: (id(p), type(p)) for n, p in module._parameters.items()}
    return type(module), held


def of_qshard(module):
    return [name for name in module.__dict__ if "qshard" in name]


# ------------------------------------------------------------------------------ a user's attributes


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "dynamic"])
def test_a_users_attribute_dynamic_stays(recipe):
    model = nn.Sequential(Halving(16, 16), nn.Linear(16, 16), nn.ReLU(), nn.LayerNorm(16))
    model.dynamic, model[1].dynamic, model[2].dynamic, model[3].dynamic = False, "mine", False, 3
    x = torch.randn(4, 16)
    plain = model[0](x).detach()
    quantize(model, recipe)
    torch.testing.assert_close(model[0](x), plain, atol=0.5, rtol=0.3)
    model(x)
    qshard.flush(model)
    qshard.report(model)
    model.load_state_dict(model.state_dict())
    qshard.dequantize_(model)
    found = [module.dynamic for module in model.modules() if "dynamic" in module.__dict__]
    assert found == [False, 0.5, "mine", False, 3]


def test_a_users_attribute_dynamic_stays_beside_weights_that_are_quantized_at_each_use():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Embedding(4, 16))
    for module in model.modules():
        module.dynamic = False
    quantize(model, "dynamic")
    model[0](torch.randn(4, 16))
    qshard.flush(model)
    qshard.report(model)
    qshard.dequantize_(model)
    assert all(module.dynamic is False for module in model.modules())


# -------------------------------------------------------------------------------------- wrappers


@ANY_RECIPE
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_that_pass_attributes_on_get_nothing(wrapper, recipe):
    model = nn.Sequential(WRAPPERS[wrapper](nn.Linear(16, 16)), nn.ReLU())
    before = contents(model[0])
    quantize(model, recipe)
    assert contents(model[0]) == before
    model(torch.randn(4, 16)).sum().backward()
    qshard.flush(model)
    model.load_state_dict(model.state_dict())
    torch._dynamo.reset()  # what has run compiled has weak references to parameters
    qshard.dequantize_(model)
    assert contents(model[0]) == before


# -------------------------------------------------------------------------------------- one object


@ANY_RECIPE
def test_a_module_holds_one_object_of_ours(recipe):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), Halving(16, 16))
    if recipe == "dynamic":
        del model[2]
    quantize(model, recipe)
    assert [of_qshard(module) for module in model.modules()][1] == ["_qshard"]
    assert all(of_qshard(module) in ([], ["_qshard"]) for module in model.modules())
    qshard.quantize_(qshard.dequantize_(model), qshard.Float8CurrentScaling())
    assert all(of_qshard(module) in ([], ["_qshard"]) for module in model.modules())


@ANY_RECIPE
@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
def test_dequantize_leaves_nothing_behind(recipe, copied):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Embedding(16, 16))
    if recipe != "dynamic":
        model.append(Halving(16, 16))
    before = [contents(module) for module in model.modules()]
    quantize(model, recipe)
    model[:2](torch.randn(4, 16)).sum().backward()
    model.load_state_dict(model.state_dict())
    other = copy.deepcopy(model)
    if copied == "pickle":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    qshard.dequantize_(model)
    assert [contents(module) for module in model.modules()] == before
    qshard.dequantize_(other)
    for module, (kind, held) in zip(other.modules(), before):
        assert type(module) is kind and module.__dict__.keys() == held.keys()
        hooks = [v for n, v in module.__dict__.items() if "hooks" in n and isinstance(v, dict)]
        assert not any(hooks)


# ------------------------------------------------------------------------ pickles written before


@pytest.fixture
def earlier():
    return torch.load(FILE, weights_only=False)


@pytest.mark.parametrize("name", ["dynamic", "beside", "shared", "stack"])
def test_pickles_of_modules_from_before_load(earlier, name):
    model = earlier[name]
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    qshard.flush(model)
    assert all(of_qshard(module) in ([], ["_qshard"]) for module in model.modules())
    assert not any("dynamic" in module.__dict__ for module in model.modules())
    model.load_state_dict(expected)
    loaded = model.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[key] + 0, value + 0) for key, value in expected.items())
    qshard.dequantize_(model)
    assert not any(of_qshard(module) for module in model.modules())


def test_modules_from_before_do_what_they_did(earlier):
    dynamic = earlier["dynamic"]
    optimizer = torch.optim.SGD(dynamic.parameters(), lr=0.1)
    before = dynamic.state_dict()["head.weight_amax_history"].clone()
    dynamic.head(dynamic.embedding(torch.arange(4))).sum().backward()
    optimizer.step()
    assert not torch.equal(dynamic.state_dict()["head.weight_amax_history"], before)
    beside = earlier["beside"]
    assert list(beside.state_dict()) == ["0.weight", "0.bias"]
    assert "0.weight_amax_history" in qshard.QuantizationState(beside).state_dict()
    stack = earlier["stack"]
    assert type(stack.state_dict()["0"]) is torch.Tensor and not qshard.is_quantized(stack.state_dict()["0"])
    shared = earlier["shared"]
    with torch.no_grad():
        shared["q_proj"].weight.mul_(4)
    qshard.flush(shared)
    assert len({ops.tensor_scale_inv(m.weight).item() for m in shared.values()}) == 1
