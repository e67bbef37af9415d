"""What quantize_ says: of arguments that it cannot take, of what it took, and in prints of a model."""

import logging
import warnings

import pytest
import torch
from torch import nn

import qshard


def model():
    return nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64, bias=False))


def warned(*args, **options):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        qshard.quantize_(*args, **options)
    return [str(w.message) for w in seen]


# ------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "name", ["float8_tensorwise", "float8_delayed", "float8_blockwise", "mxfp8", "nvfp4", "mxfp8_1x32"]
)
def test_a_recipe_by_its_formats_name(name):
    linear = qshard.quantize_(nn.Linear(32, 32), name)
    assert qshard.ops.format(linear.weight) == name
    with qshard.quantized_model_init(recipe=name):
        assert qshard.ops.format(qshard.nn.Linear(32, 32).weight) == name


@pytest.mark.parametrize(
    "error, text, arguments",
    [
        (ValueError, "recipe 'float8' is not known.*float8_blockwise", {"recipe": "float8"}),
        (TypeError, "recipe is the class NVFP4BlockScaling.*NVFP4BlockScaling()", {"recipe": qshard.NVFP4BlockScaling}),
        (TypeError, "recipe is None; expected a recipe", {"recipe": None}),
        (TypeError, "filter_fn must be a function of .module, name.*got list", {"filter_fn": ["1"]}),
        (TypeError, "filter_fn must be a function .*got str", {"filter_fn": "1"}),
        (TypeError, "parameter_fn must be a function of .parameter, name.*got set", {"parameter_fn": {"1"}}),
        (TypeError, "model must be a torch.nn.Module, got dict", {"model": {"a": 1}}),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named_before_anything_is_changed(error, text, arguments):
    kept = model()
    with pytest.raises(error, match=text):
        qshard.quantize_(**{"model": kept, "recipe": "nvfp4", **arguments})
    assert not any(qshard.is_quantized(p) for p in kept.parameters())


# -------------------------------------------------------------------------------- what surprises


def test_one_warning_names_all_that_surprises():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1 = nn.Parameter(torch.randn(4, 32, 16))

    said = warned(nn.Sequential(*model(), Experts()), "nvfp4", keep_master=False)
    assert len(said) == 1
    for text in ("2, which has the shape of an embedding table", "3.w1 look like weights", "stochastic_rounding=True"):
        assert text in said[0]


def test_nothing_is_said_of_what_is_usual(caplog):
    chosen = {"filter_fn": lambda module, name: True}
    with caplog.at_level(logging.INFO, "qshard"):
        assert not warned(model(), "mxfp8", **chosen)
    assert caplog.messages == ["quantize_: 2 modules or parameters as mxfp8: 1, 2"]
    assert not warned(model(), "mxfp8", keep_master=False, stochastic_rounding=True, **chosen)
    assert not warned(model().requires_grad_(False), "mxfp8", keep_master=False, **chosen)
    assert not warned(nn.Sequential(nn.Linear(32, 48)), "mxfp8")


# ------------------------------------------------------------------------------- prints and reports


def test_prints_show_the_format():
    layers = nn.ModuleDict({
        "linear": nn.Linear(32, 32),
        "norm": qshard.nn.LayerNormLinear(32, 32),
        "mlp": qshard.nn.LayerNormMLP(32, 64),
    })  # fmt: skip
    plain = str(layers)
    for name in ("linear", "norm", "mlp"):
        qshard.quantize_(layers[name], "float8_blockwise", weight_only=name == "mlp")
    text = str(layers)
    assert text.count("format=float8_blockwise") == 3 and text.count("weight_only=True") == 1
    assert str(qshard.dequantize_(layers)) == plain
    linear = qshard.quantize_(nn.Linear(32, 32), "mxfp8", weights="dynamic")
    assert "format=mxfp8 at each use" in str(linear)
    head = nn.Linear(32, 64, bias=False)
    tied = nn.Sequential(nn.Embedding(64, 32), head)
    head.weight = tied[0].weight
    qshard.quantize_(tied, "nvfp4", filter_fn=lambda *_: True)
    assert "Embedding(64, 32, format=nvfp4)" in str(tied)


def test_reports_name_the_recipe():
    report = qshard.report(qshard.quantize_(nn.Linear(32, 32), qshard.MXFP8BlockScaling((1, 32))))
    assert [(row.format, row.recipe) for row in report] == [
        ("mxfp8_1x32", "MXFP8BlockScaling"), ("float32", ""),
    ]  # fmt: skip
    dynamic = qshard.report(qshard.quantize_(nn.Linear(32, 32), "mxfp8", weights="dynamic"))
    assert dynamic[0].recipe == "MXFP8BlockScaling" and "MXFP8BlockScaling" in str(dynamic)


# --------------------------------------------------------------------------------- inference mode


@pytest.mark.parametrize("options", [{}, {"keep_master": False}], ids=["master", "no master"])
def test_what_is_converted_under_inference_mode_can_be_trained(options):
    layers = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with torch.inference_mode():
        qshard.quantize_(layers, "float8_blockwise", **options)
    layers(torch.randn(4, 32)).sum().backward()
    torch.optim.SGD(layers.parameters(), lr=0.1).step()
    with torch.inference_mode():
        qshard.dequantize_(layers)
        assert torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
    assert not any(p.is_inference() for p in layers.parameters())
    layers(torch.randn(4, 32)).sum().backward()
    torch.optim.SGD(layers.parameters(), lr=0.1).step()
