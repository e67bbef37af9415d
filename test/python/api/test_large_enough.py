"""Which layers are large enough to gain time, and when quantize_ says that most are not."""

import warnings

import pytest
import torch
from torch import nn

import qshard
from qshard.model import large_layers

RECIPES = ["float8_tensorwise", "float8_delayed", "float8_rowwise", "float8_blockwise"]


def linear(rows, columns, **kwargs):
    return nn.Linear(columns, rows, bias=False, device="meta", **kwargs)


def first_width(tokens, recipe):
    """The narrowest square layer that is taken."""
    takes = qshard.large_enough(tokens=tokens, recipe=recipe)
    taken = [width for width in range(16, 4097, 2) if takes(linear(width, width), "")]
    assert taken == list(range(taken[0], 4097, 2))  # and all wider ones
    return taken[0]


@pytest.mark.parametrize(
    "recipe, tokens, width",
    [
        ("float8_tensorwise", 2048, 1550),
        ("float8_tensorwise", 8192, 970),
        ("float8_delayed", 8192, 970),
        ("float8_rowwise", 8192, 970),
        (qshard.Float8BlockScaling(), 8192, 1160),
        ("float8_blockwise", 2048, 1790),
    ],
    ids=str,
)
def test_the_bounds_of_the_docs(recipe, tokens, width):
    assert first_width(tokens, recipe) == pytest.approx(width, abs=6)


# (rows, columns): measured below bf16's time at 16,384 tokens (bench/results/2026-11-22-h200.md).
FASTER = [(4096, 4096), (14336, 4096), (4096, 14336), (8192, 28672), (1024, 4096)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_takes_what_was_measured_to_be_faster(recipe):
    takes = qshard.large_enough(tokens=16384, recipe=recipe)
    assert all(takes(linear(*shape), "") for shape in FASTER)
    assert not takes(linear(512, 512), "")  # a GPT of this width is slower than in bf16


def test_modules_of_several_weights():
    takes = qshard.large_enough(tokens=8192)
    with torch.device("meta"):
        assert takes(qshard.nn.LayerNormMLP(1024, 4096), "")
        assert not takes(qshard.nn.LayerNormMLP(256, 512), "")
        assert takes(qshard.nn.GroupedExperts(2048, 1024, 8), "")
        assert not takes(qshard.nn.GroupedExperts(256, 256, 8), "")
    assert not takes(nn.LayerNorm(4096), "")


def test_in_quantize():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    last = qshard.large_enough(tokens=8192, filter_fn=lambda _, name: name != "2")
    qshard.quantize_(model, "float8_tensorwise", filter_fn=last)
    assert [qshard.is_quantized(m.weight) for m in model] == [False, True, False]
    with pytest.raises(ValueError, match="no nn.Linear was chosen; check filter_fn"):
        qshard.quantize_(nn.Linear(64, 64), "float8_tensorwise", filter_fn=qshard.large_enough(tokens=8192))


@pytest.mark.parametrize(
    "error, text, options",
    [
        (ValueError, "tokens must be a number of rows, 1 or more, got 0", dict(tokens=0)),
        (ValueError, "tokens must be a number of rows, 1 or more, got 2.5", dict(tokens=2.5)),
        (ValueError, "mxfp8 has no FP8 GEMM whose rate was measured", dict(tokens=1, recipe="mxfp8")),
        (ValueError, "nvfp4 has no FP8 GEMM", dict(tokens=1, recipe=qshard.NVFP4BlockScaling())),
        (ValueError, "qshard.large_enough: recipe 'fp8' is not known", dict(tokens=1, recipe="fp8")),
        (TypeError, "filter_fn must be a function of .module, name.*got list", dict(tokens=1, filter_fn=["a"])),
    ],
)
def test_wrong_arguments(error, text, options):
    with pytest.raises(error, match=text):
        qshard.large_enough(**options)


# ------------------------------------------------------------------------- what quantize_ says


def narrow():
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(1024, 1024))


def said(recipe="float8_tensorwise", model=None, **options):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        qshard.quantize_(model or narrow(), recipe, **options)
    return [str(w.message) for w in seen]


@pytest.fixture
def as_if_on_a_gpu(monkeypatch):
    monkeypatch.setattr(large_layers, "_multiplies_here", lambda module, format: True)


def test_nothing_is_said_of_weights_on_other_devices():
    assert said() == []
    assert said(model=narrow().to("meta")) == []


@pytest.mark.parametrize("weights", ["quantized", "dynamic"])
def test_one_line_names_the_narrow_ones(as_if_on_a_gpu, weights):
    (text,) = said(weights=weights)
    assert "2 of 3 linears (0, 1) are too narrow" in text and "qshard.large_enough(tokens=...)" in text


@pytest.mark.parametrize(
    "recipe, options",
    [
        ("float8_tensorwise", dict(filter_fn=lambda _, name: name != "0")),  # half of them are wide
        ("float8_tensorwise", dict(filter_fn=qshard.large_enough(tokens=10**6))),  # they know better
        ("float8_tensorwise", dict(weight_only=True)),
        ("mxfp8", {}),
        (qshard.Float8CurrentScaling(emulate=True), {}),
    ],
)
def test_when_nothing_is_said(as_if_on_a_gpu, recipe, options):
    assert said(recipe, **options) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    has_fp8 = torch.cuda.get_device_capability()[0] == 9
    assert len(said(model=narrow().cuda())) == has_fp8
