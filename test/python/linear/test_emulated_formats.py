"""emulate=True is a property of the format: what keeps a format keeps it, and reports name it."""

import copy
import io
import pickle

import pytest
import torch
from helpers import bits
from test_emulation import BASIC, RECIPES, by_format, linear, run, without_emulation

import qshard
from qshard._runtime.classes import TensorState

ops = torch.ops.qshard


@pytest.mark.parametrize("recipe", RECIPES, **by_format)
def test_is_part_of_the_format_and_of_nothing_that_is_stored(recipe):
    base = without_emulation(recipe)
    value = torch.randn(64, 48)
    q, real = (ops.quantize(value, r.format) for r in (recipe, base))
    assert ops.format(q) == recipe.format and "emulate" not in base.format
    assert ops.format(q) != ops.format(real)
    assert torch.equal(bits(TensorState(q).pack()[0]), bits(TensorState(real).pack()[0]))


def test_options_have_one_order():
    q = ops.quantize(torch.randn(16, 16), "nvfp4[stochastic,emulate]")
    assert ops.format(q) == "nvfp4[emulate,stochastic]"
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    recipe = qshard.NVFP4BlockScaling(emulate=True)
    qshard.quantize_(model, recipe, keep_master=False, stochastic_rounding=True)
    assert ops.format(model[0].weight) == "nvfp4[emulate,stochastic]"


@pytest.mark.parametrize("recipe", BASIC, **by_format)
def test_copies_and_files_keep_it(recipe):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 64, bias=False))
    qshard.quantize_(model, recipe)
    x = torch.randn(20, 48)
    y = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)
    for other in copies:
        assert ops.format(other[0].weight) == recipe.format
        assert torch.equal(other(x), y)
    loaded = qshard.quantize_(torch.nn.Sequential(torch.nn.Linear(48, 64, bias=False)), recipe)
    loaded.load_state_dict(model.state_dict())
    assert ops.format(loaded[0].weight) == recipe.format
    assert torch.equal(loaded(x), y)
    real = torch.nn.Sequential(torch.nn.Linear(48, 64, bias=False))
    qshard.quantize_(real, without_emulation(recipe)).load_state_dict(model.state_dict())
    qshard.flush(real)
    for plane in (ops.codes, ops.scale_inv, ops.master):
        assert torch.equal(bits(plane(real[0].weight.detach())), bits(plane(model[0].weight.detach())))


@pytest.mark.parametrize("recipe", BASIC, **by_format)
def test_a_model_can_leave_it_and_come_back(recipe):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 64))
    x = torch.randn(20, 48)

    def output():
        with torch.no_grad():
            return model(x)

    plain = output()
    qshard.quantize_(model, recipe)
    y = output()
    qshard.dequantize_(model)
    assert torch.equal(output(), plain)
    qshard.quantize_(model, recipe)
    assert torch.equal(output(), y) and not torch.equal(y, plain)


def test_the_report_says_that_it_is_emulated():
    for recipe in (qshard.Float8BlockScaling(emulate=True), qshard.MXFP8BlockScaling(emulate=True)):
        run(linear(torch.randn(32, 48), recipe), torch.randn(4, 48), torch.randn(4, 32))
        lines = qshard.backend_report().splitlines()
        for direction in ("forward", "grad_input", "grad_weight"):
            line = f"{recipe.format} {direction}: emulated GEMM of dequantized codes"
            assert any(path.startswith(line) for path in lines), lines


def test_says_why_a_target_would_dequantize():
    module = linear(torch.randn(24, 48), qshard.Float8BlockScaling(emulate=True))
    before = qshard.backend_report().splitlines()  # other tests of this process left them
    run(module, torch.randn(4, 48), torch.randn(4, 24))
    start = "float8_blockwise[emulate] forward: dequantized GEMM"
    lines = [line for line in qshard.backend_report().splitlines() if line.startswith(start) and line not in before]
    assert len(lines) == 1 and "out features is not a multiple of 16" in lines[0]


@pytest.mark.parametrize("weights", ["quantized", "dynamic"])
def test_there_is_no_gemm_to_emulate_for_weight_only(weights):
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    before = model[0].weight
    with pytest.raises(ValueError, match="weight_only .* leave one of the two out"):
        qshard.quantize_(model, qshard.MXFP8BlockScaling(emulate=True), weight_only=True, weights=weights)
    assert model[0].weight is before and type(model[0]) is torch.nn.Linear


@pytest.mark.parametrize("recipe", BASIC, **by_format)
def test_weights_that_stay_plain(recipe):
    """weights="dynamic" computes what quantized weights with a master do."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 64))
    twin = copy.deepcopy(model)
    qshard.quantize_(model, recipe)
    qshard.quantize_(twin, recipe, weights="dynamic")
    x, grad = torch.randn(20, 48), torch.randn(20, 64)
    torch.manual_seed(1)
    expected = run(model[0], x, grad)
    torch.manual_seed(1)
    for got, of_quantized in zip(run(twin[0], x, grad), expected):
        assert torch.equal(got, of_quantized)
