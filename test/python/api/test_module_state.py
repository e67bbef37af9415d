"""What qshard remembers of a module is one object in it, and nothing of a user's is taken for ours."""

import copy
import io
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import qshard
from qshard import module_state

BUDGET_S = 60  # one case of each recipe compiles a linear
ops = torch.ops.qshard
FILES = Path(__file__).parents[1] / "files"
FILE = FILES / "before_module_state.pt"
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


OURS = ("weight_only", "weight_format", "parallel", "style", "is_tensor_parallel")


@ANY_RECIPE
def test_a_linear_with_attributes_of_all_our_names(recipe):
    model, usual = (nn.Sequential(nn.Linear(16, 16)) for _ in range(2))
    usual.load_state_dict(model.state_dict())
    for name in OURS:
        setattr(model[0], name, "mine")
    x = torch.randn(4, 16)
    assert torch.equal(quantize(model, recipe)(x), quantize(usual, recipe)(x))
    assert [getattr(model[0], name) for name in OURS] == ["mine"] * len(OURS)
    qshard.dequantize_(model)
    assert [getattr(model[0], name) for name in OURS] == ["mine"] * len(OURS)
    assert type(model[0]) is nn.Linear


class Watched:
    """Notes the attributes of a user's module that code of qshard looks up."""

    looked_up = set()

    def __getattribute__(self, name):
        if sys._getframe(1).f_globals.get("__name__", "").startswith(("qshard", "_qshard")):
            Watched.looked_up.add((type(self).__name__, name))
        return super().__getattribute__(name)


class WatchedLinear(Watched, nn.Linear):
    pass


class WatchedTable(Watched, nn.Embedding):
    pass


class WatchedBlock(Watched, nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = WatchedTable(32, 16), WatchedLinear(16, 32, bias=False)
        self.norm, self.up = nn.LayerNorm(16), WatchedLinear(16, 16)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.up(self.norm(self.table(x))))


OF_TORCH = {*dir(WatchedBlock()), *dir(nn.Linear(1, 1)), *dir(nn.Embedding(1, 1))}


@ANY_RECIPE
def test_no_attribute_of_a_users_module_is_looked_up_but_torchs(recipe):
    Watched.looked_up.clear()
    model = quantize(WatchedBlock(), recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.arange(7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    qshard.flush(model)
    str(qshard.report(model, optimizer=optimizer))
    model.load_state_dict(copy.deepcopy(model).state_dict())
    state = qshard.QuantizationState(model)
    state.load_state_dict(state.state_dict())
    qshard.dequantize_(quantize(model.to(torch.bfloat16), recipe) if recipe != "dynamic" else model)
    assert {name for _, name in Watched.looked_up} - OF_TORCH - {"_qshard"} == set()


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


class Subclass(nn.Linear):
    """Multiplies as nn.Linear does."""


def test_pickles_of_modules_that_had_attributes_in_place_of_a_state():
    """Written by the version before these: weight_only and weight_format were attributes of our modules, and
    an object of its own in the state of a subclass."""
    earlier = torch.load(FILES / "before_shown_attributes.pt", weights_only=False)
    x = torch.linspace(-1, 1, 64).view(4, 16)
    for name, (recipe, options) in earlier["options"].items():
        recipe = RECIPES[recipe][0]
        for model in (earlier["models"][name], copy.deepcopy(earlier["models"][name])):
            twin = nn.Sequential(nn.Linear(16, 16), Subclass(16, 16), qshard.nn.Linear(16, 16))
            twin = twin[: len(model)]
            twin.load_state_dict(earlier["values"][name])
            qshard.quantize_(twin, recipe, **options)
            assert torch.equal(model(x), twin(x))
            assert repr(model) == repr(twin)
            qshard.dequantize_(model)
            assert [type(m) for m in model] == [nn.Linear, Subclass, qshard.nn.Linear][: len(model)]
            assert not of_qshard(model[0]) and model[0].style == "mine"


def test_shown_attributes_are_written_where_forwards_read_them():
    linear = qshard.quantize_(nn.Sequential(nn.Linear(64, 64)), qshard.Float8CurrentScaling())[0]
    assert linear.weight_only is False
    linear.weight_only = True
    assert linear.weight_only is True and module_state.find(linear).weight_only is True
    with pytest.raises(AttributeError, match="weight_only"):
        del linear.weight_only
    users = nn.Sequential(nn.Linear(64, 64))
    users[0].weight_only = "the user's"
    qshard.quantize_(users, qshard.Float8CurrentScaling())
    assert users[0].weight_only == "the user's" and module_state.find(users[0]).weight_only is False
    users[0].weight_only = "another"
    assert users[0].weight_only == "another" and module_state.find(users[0]).weight_only is False
    del users[0].weight_only
    assert users[0].weight_only is False
