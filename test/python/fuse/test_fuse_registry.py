"""What fuse_ knows, and that fused modules are copied, pickled and called as their classes say."""

import abc
import copy
import inspect
import itertools
import pickle
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import saved_and_loaded
from nn_helpers import assert_bits, randomize
from test_fuse import MLP, OtherNames, TwiceRounded, ZeroCentered, input_of
from torch import nn

import qshard
from qshard.fuse import GatedMLP, Norm, PackedMLP, Rotary, register, registry


class Packed(nn.Module):
    """As Hugging Face's Phi-3."""

    def __init__(self, act=None):
        super().__init__()
        self.gate_up, self.down = nn.Linear(32, 128, bias=False), nn.Linear(64, 32)
        self.act = act or nn.SiLU()

    def forward(self, hidden_states):
        gate, up = self.gate_up(hidden_states).chunk(2, dim=-1)
        return self.down(up * self.act(gate))


register(Packed, PackedMLP("gate_up", "down", "act"))


def saved_by(module, x):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        module(x)
    return {(t.untyped_storage().data_ptr(), t.shape) for t in kept}


@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU(approximate="tanh"), nn.Sigmoid()])
def test_packed_mlps_give_the_same_bits(act):
    plain = Packed(act)
    module, x = copy.deepcopy(plain), input_of(7, 32)
    assert len(qshard.fuse_(module)) == 1
    for one in (plain, module):
        one(x).square().sum().backward()
    assert_bits([p.grad for p in module.parameters()], [p.grad for p in plain.parameters()])
    wide = [shape for _, shape in saved_by(module, x) if shape[:1] == (7,) and shape != (7, 32)]
    assert sorted(wide) == [(7, 64), (7, 128)]  # the last linear's input, and gate_up's result


# --------------------------------------------------------------------------------------- register


@pytest.mark.parametrize("cls, part, error", [
    (nn.Linear(2, 2), Norm(), "expected a class of modules, got Linear"),
    (dict, Norm(), "expected a class of modules"),
    (TwiceRounded, "RMSNorm", "a part as qshard.fuse.Norm for TwiceRounded, got 'RMSNorm'"),
    (TwiceRounded, Norm, "expected a part"),
    (TwiceRounded, Rotary(), r"3 arguments by name, and TwiceRounded.forward\(self, .*\) has 1"),
    (nn.Module, Norm(), r"Norm takes 1 arguments by name"),
])
def test_what_register_refuses(cls, part, error):
    with pytest.raises((TypeError, ValueError), match=f"qshard.fuse.register: .*{error}"):
        register(cls, part)


def test_fused_classes_are_not_registered():
    module = TwiceRounded(8)
    qshard.fuse_(module)
    with pytest.raises(TypeError, match="TwiceRounded is fused; register what it was made of"):
        register(type(module), Norm())


def test_norms_are_of_two_kinds():
    with pytest.raises(ValueError, match='"RMSNorm" or "LayerNorm", and not \'GroupNorm\''):
        Norm("GroupNorm")


def test_a_class_is_registered_again():
    class Here(TwiceRounded):
        pass

    x = input_of(3, 8)
    assert register(Here, Norm(eps="variance_epsilon")) is Here
    first, second = Here(8), Here(8)
    assert len(qshard.fuse_(first)) == 1
    register(Here, Norm(eps="variance_epsilon", zero_centered=True))
    assert len(qshard.fuse_(second)) == 1
    torch.testing.assert_close(second(x), 2 * first(x))


def test_nothing_is_tried_out():
    """A module that is found is not run, nor read but for what its part names."""

    class Counts(TwiceRounded):
        calls = 0

        def forward(self, hidden_states):
            Counts.calls += 1
            return super().forward(hidden_states)

    register(Counts, Norm(eps="variance_epsilon"))
    with torch.device("meta"):
        model = nn.Sequential(Counts(8), nn.Sequential(Counts(8), MLP()))
    state = torch.get_rng_state()
    assert len(qshard.fuse_(model)) == 3 and Counts.calls == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_the_package_has_no_code_that_reads_code():
    for name, module in list(sys.modules.items()):
        if name.startswith("qshard.fuse"):
            source = inspect.getsource(module)
            for word in ("import ast", "import fx", "getsource", "co_", "FunctionType", "__code"):
                assert word not in source, (name, word)


# ------------------------------------------------------------------------------ copies and pickles


class WithState(TwiceRounded):
    """Leaves a cache out of its pickles and copies."""

    def __init__(self, size):
        super().__init__(size)
        self.cache = object()  # of which no copies are wanted

    def __getstate__(self):
        return {**self.__dict__, "cache": "left out"}

    def __setstate__(self, state):
        self.__dict__.update(state, restored=True)


class WithReduce(TwiceRounded):
    def __reduce__(self):
        return type(self), (self.weight.shape[0],), {"restored": True}

    def __setstate__(self, state):
        self.__dict__.update(state)


class WithDeepcopy(TwiceRounded):
    def __deepcopy__(self, memo):
        other = type(self)(self.weight.shape[0])
        other.restored = True
        return memo.setdefault(id(self), other)

    def __reduce_ex__(self, protocol):
        return type(self), (self.weight.shape[0],), {"restored": True}


class OfMetaclass(TwiceRounded, metaclass=abc.ABCMeta):
    restored = True


for cls in (WithState, WithReduce, WithDeepcopy, OfMetaclass):
    register(cls, Norm(eps="variance_epsilon"))


def by_protocol(protocol):
    return lambda module: pickle.loads(pickle.dumps(module, protocol))


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, copy.copy, saved_and_loaded, *map(by_protocol, range(2, 6))]
)
@pytest.mark.parametrize("cls", [WithState, WithReduce, WithDeepcopy, OfMetaclass])
def test_copies_are_made_as_the_class_says(cls, duplicate):
    module = cls(8)
    qshard.fuse_(module)
    kind = type(module)
    assert kind is not cls and isinstance(module, cls)
    assert (kind.__name__, kind.__module__) == (cls.__name__, __name__)
    other = duplicate(module)
    assert type(other) is kind
    assert other.restored is True or (cls is WithDeepcopy and duplicate is copy.copy)
    if cls is WithState:
        assert other.cache == "left out"
    assert_bits(other(input_of(3, 8)), module(input_of(3, 8)))
    assert not qshard.fuse_(other)


def test_pickles_are_read_where_the_class_is_not_registered(monkeypatch):
    """A process that did not register it gets plain modules."""
    module, x = randomize(TwiceRounded(8)), input_of(3, 8)
    qshard.fuse_(module)
    saved = pickle.dumps(module)
    assert type(pickle.loads(saved)) is type(module)
    monkeypatch.delitem(registry._registered, TwiceRounded)
    plain = pickle.loads(saved)
    assert type(plain) is TwiceRounded
    torch.testing.assert_close(plain(x), module(x))


# -------------------------------------------------------------------------------------- signatures


@pytest.mark.parametrize("make", [
    lambda: TwiceRounded(32), lambda: ZeroCentered(32), MLP, OtherNames, Packed,
    lambda: nn.RMSNorm(32, eps=1e-6), lambda: nn.LayerNorm(32),
])
def test_arguments_have_the_names_that_they_had(make):
    plain = randomize(make())
    module, x = copy.deepcopy(plain), input_of(7, 32)
    assert len(qshard.fuse_(module)) == 1
    assert inspect.signature(module.forward) == inspect.signature(plain.forward)
    assert module.forward.__doc__ == plain.forward.__doc__ and repr(module) == repr(plain)
    (name,) = inspect.signature(plain.forward).parameters
    assert_bits(module(**{name: x}), module(x))
    for args, kwargs in (((), {"other": x}), ((x, x), {}), ((x,), {name: x}), ((), {})):
        with pytest.raises(TypeError):
            module(*args, **kwargs)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: module(**{name: x}), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), plain(x), rtol=1e-5, atol=1e-5)


def test_blocks_are_compiled_once():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            block = nn.Sequential(TwiceRounded(32), MLP(), TwiceRounded(32))
            assert len(qshard.fuse_(block)) == 3
            block.compile(fullgraph=True, backend="aot_eager")
            block(input_of(7, 32)).sum().backward()


# ----------------------------------------------------------------------------------- torch's norms


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("dtypes", itertools.product((torch.float32, torch.bfloat16), repeat=2))
@pytest.mark.parametrize("cls", [nn.RMSNorm, nn.LayerNorm])
def test_torchs_norms_keep_their_dtypes(cls, dtypes, enabled):
    plain = randomize(cls(32, eps=1e-3)).to(dtypes[0])
    module, x = copy.deepcopy(plain), input_of(7, 32, dtype=dtypes[1]).detach()
    assert len(qshard.fuse_(module)) == 1
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        try:
            expected = plain(x)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error)[:20])):
                module(x)
            return
        y = module(x)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("bias", [False, True])
def test_layer_norms_without_a_bias(bias):
    plain = randomize(nn.LayerNorm(32, bias=bias))
    module, x = copy.deepcopy(plain), input_of(7, 32)
    (row,) = qshard.fuse_(module)
    assert row.pattern == "LayerNorm, eps=1e-05"
    for one in (plain, module):
        one(x).square().sum().backward()
    torch.testing.assert_close(module(x), plain(x))
    grads = [[p.grad for p in one.parameters()] for one in (module, plain)]
    torch.testing.assert_close(*grads)


# ------------------------------------------------------------------------------------------- hooks


def test_hooks_of_all_modules_see_activations():
    plain, seen = MLP(), []
    module, x = copy.deepcopy(plain), input_of(7, 32)
    qshard.fuse_(module)
    watch = torch.nn.modules.module.register_module_forward_hook
    handle = watch(lambda m, *_: seen.append(type(m).__name__))
    try:
        y = module(x)
    finally:
        handle.remove()
    assert "SiLU" in seen
    assert_bits(y, plain(x))


def test_what_was_fused_is_registered_with_functions():
    class Functional(MLP):
        def forward(self, x):
            return self.down_proj(F.relu(self.gate_proj(x)) * self.up_proj(x))

    register(Functional, GatedMLP("gate_proj", "up_proj", "down_proj", F.relu))
    plain = Functional()
    module, x = copy.deepcopy(plain), input_of(7, 32)
    (row,) = qshard.fuse_(module)
    assert row.pattern == "down_proj(reglu of gate_proj, up_proj)"
    assert_bits(module(x), plain(x))
