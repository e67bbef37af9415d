"""print(model) shows the formats of modules of any class, and what their extra_repr says otherwise."""

import copy
import functools
import gc
import pickle
import weakref

import pytest
import torch
from models.own_forwards import Matrix, plain, quantize, write_plain
from torch import nn

import qshard


def shown(model):
    return [line.split(": ", 1)[1] for line in repr(model).splitlines() if line.startswith("  (")]


@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_print_shows_the_format_of_every_class(copied):
    model = copied(quantize(plain(), "mxfp8"))
    sizes = "in_features=32, out_features=32, bias=True, format=mxfp8"
    assert shown(model) == [
        f"Linear({sizes})", f"Bare({sizes})", f"Scaled({sizes})", "Stack(experts=2, format=(experts=mxfp8))",
        "Matrix(format=mxfp8)",
    ]
    write_plain(model, "experts")
    write_plain(model, "matrix")
    assert shown(model)[3:] == ["Stack(experts=2)", "Matrix()"]
    qshard.dequantize_(model)
    assert not any("format" in line for line in shown(model))


def test_print_names_parameters_of_several_formats():
    module = nn.ModuleList([Matrix()])
    module[0].other = nn.Parameter(torch.randn(32, 32))
    quantize(module, "mxfp8", parameter_fn=lambda _, name: "matrix" in name)
    assert shown(module) == ["Matrix(format=(matrix=mxfp8))"]
    quantize(module, "float8_blockwise", parameter_fn=lambda _, name: "other" in name)
    assert shown(module) == ["Matrix(format=(matrix=mxfp8, other=float8_blockwise))"]


def test_print_calls_what_a_user_has_set_on_the_module():
    model, own = plain(), functools.partial(str, "mine")
    model[4].extra_repr = own
    for _ in range(2):
        quantize(model)
    assert shown(model)[4] == "Matrix(mine, format=float8_blockwise)"
    qshard.dequantize_(model)
    assert model[4].extra_repr is own and shown(model)[4] == "Matrix(mine)"


class Static(Matrix):
    @staticmethod
    def extra_repr():
        return "static"


class OfClass(Matrix):
    @classmethod
    def extra_repr(cls):
        return cls.__name__


@pytest.mark.parametrize("kind, own", [(Static, "static"), (OfClass, "OfClass")])
def test_print_calls_methods_without_a_module(kind, own):
    assert shown(quantize(nn.Sequential(kind()))) == [f"{kind.__name__}({own}, format=float8_blockwise)"]


@pytest.mark.parametrize(
    "copied", [copy.copy, lambda m: copy.deepcopy(copy.copy(m)), lambda m: pickle.loads(pickle.dumps(copy.copy(m)))]
)
def test_shallow_copies_are_shown_when_the_module_is_gone(copied):
    copy_ = copied(quantize(plain())[4])
    assert repr(copy_) == "Matrix()"


class Table(nn.Embedding):
    """Has a forward of its own."""

    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize("weights", ["quantized", "dynamic"])
@pytest.mark.parametrize("kind", [nn.Embedding, Table])
def test_print_shows_the_format_of_tied_tables(kind, weights):
    model = nn.Sequential(kind(64, 32), nn.Linear(32, 64, bias=False))
    model[1].weight = model[0].weight
    before = repr(model)
    qshard.quantize_(model, "mxfp8", weights=weights, filter_fn=lambda *_: True)
    assert shown(model)[0] == f"{kind.__name__}(64, 32, format=mxfp8{' at each use' * (weights == 'dynamic')})"
    qshard.dequantize_(model)
    assert repr(model) == before


def test_a_model_is_freed_without_the_garbage_collector():
    model = quantize(plain())
    gone = weakref.ref(model[3])
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
