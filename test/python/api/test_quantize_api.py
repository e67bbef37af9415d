"""quantize_, recipes, reports: what the package does to a model."""

import copy

import pytest
import torch
import torch.nn as nn
from torch.multiprocessing.reductions import StorageWeakRef

import qshard
from qshard._runtime.classes import TensorState

ops = torch.ops.qshard


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 8))


@pytest.mark.parametrize(
    "recipe,format",
    [
        (qshard.Float8CurrentScaling(), "float8_tensorwise"),
        (qshard.Float8CurrentScaling(use_power_2_scales=False), "float8_tensorwise_fp32_scale"),
        (qshard.Float8RowwiseScaling(), "float8_rowwise"),
        (qshard.Float8RowwiseScaling(use_f32_scales=True), "float8_rowwise_fp32_scale"),
        (qshard.Float8BlockScaling(), "float8_blockwise"),
        (qshard.Float8BlockScaling(use_f32_scales=True), "float8_blockwise_fp32_scale"),
        (qshard.Float8BlockScaling(x_block_scaling_dim=1), "float8_blockwise[x_block_scaling_dim=1]"),
        (qshard.MXFP8BlockScaling(), "mxfp8"),
        (qshard.NVFP4BlockScaling(), "nvfp4"),
        (qshard.NVFP4BlockScaling(disable_2d_quantization=True), "nvfp4_1x16"),
        (qshard.NVFP4BlockScaling(disable_rht=True), "nvfp4[no_hadamard]"),
        (qshard.NVFP4BlockScaling(disable_stochastic_rounding=True), "nvfp4[nearest_gradients]"),
        (qshard.NVFP4BlockScaling(four_over_six=True), "nvfp4[4over6]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_recipe_argument_acts(recipe, format):
    m = qshard.quantize_(model(), recipe)
    scales = ops.scale_inv(m[0].weight).float()
    assert ops.format(m[0].weight) == format
    is_power_of_two = torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))
    assert is_power_of_two == ("fp32" not in format and "nvfp4" not in format)


def test_arguments_of_mxfp8_choose_the_format():
    recipe = qshard.MXFP8BlockScaling
    for arguments, format in (
        ({"weight_block": (1, 32)}, "mxfp8_1x32"),
        ({"weight_block": (1, 32), "gather": "phase"}, "mxfp8_1x32[phase]"),
    ):
        m = qshard.quantize_(nn.Sequential(nn.Linear(48, 64)), recipe(**arguments))
        assert ops.format(m[0].weight) == recipe(**arguments).format == format
        sent = TensorState(m[0].weight).storage_bytes()["sent"]
        assert sent == 64 * (64 if "phase" in format else 128)
    for arguments, match in (
        ({"weight_block": (32, 1)}, r"weight_block must be \(32, 32\) or \(1, 32\), got \(32, 1\)"),
        ({"weight_block": (1, 32), "gather": "one"}, "gather must be 'both' or 'phase', got 'one'"),
        ({"gather": "phase"}, r"gather='phase' needs weight_block=\(1, 32\)"),
    ):
        with pytest.raises(ValueError, match="MXFP8BlockScaling: " + match):
            recipe(**arguments)


def test_rows_that_do_not_fit_change_nothing():
    m = model()
    with pytest.raises(ValueError, match="multiple of 32 rows, got 48.*use the format mxfp8"):
        qshard.quantize_(m, qshard.MXFP8BlockScaling(weight_block=(1, 32)))
    assert not any(qshard.is_quantized(p) for p in m.parameters())


def test_replaces_weights_and_keeps_everything_else():
    m = model()
    plain = copy.deepcopy(m)
    m[2].weight.requires_grad_(False)
    m[0].weight.some_attribute = 1
    names = list(m.state_dict())
    assert qshard.quantize_(m, qshard.Float8BlockScaling()) is m
    assert list(m.state_dict()) == names
    assert type(m[0].weight) is nn.Parameter and type(m[0]) is qshard.nn.Linear
    assert m[0].weight.dtype == torch.float32 and m[0].weight.some_attribute == 1
    assert m[0].weight.requires_grad and not m[2].weight.requires_grad
    assert torch.equal(m[0].weight + 0, plain[0].weight + 0)
    assert not qshard.is_quantized(m[0].bias)


def test_filter_fn_gets_module_and_name():
    m = qshard.quantize_(
        model(), qshard.Float8BlockScaling(), filter_fn=lambda module, name: name != "2"
    )
    assert qshard.is_quantized(m[0].weight) and not qshard.is_quantized(m[2].weight)
    assert type(m[2]) is nn.Linear


def test_without_master_the_codes_are_all_there_is():
    m = qshard.quantize_(model(), qshard.Float8BlockScaling(), keep_master=False)
    assert ops.master(m[0].weight.detach()) is None
    assert m[0].weight.untyped_storage().nbytes() == 48 * 32 + 16


def test_tied_weights_stay_tied():
    m = nn.ModuleDict({"embedding": nn.Embedding(64, 32), "head": nn.Linear(32, 64, bias=False)})
    m["head"].weight = m["embedding"].weight
    qshard.quantize_(m, qshard.Float8BlockScaling(), filter_fn=lambda *_: True)
    assert m["head"].weight is m["embedding"].weight
    assert type(m["embedding"]) is qshard.nn.Embedding


def test_meta_model_keeps_quantized_through_to_empty_and_reset():
    with torch.device("meta"):
        m = model()
    qshard.quantize_(m, qshard.Float8BlockScaling())
    assert qshard.is_quantized(m[0].weight) and m[0].weight.is_meta
    m.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in m:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert qshard.is_quantized(m[0].weight)
    reference = model()
    assert torch.equal(m[0].weight + 0, reference[0].weight + 0)
    expected = ops.quantize(reference[0].weight.detach(), "float8_blockwise")
    assert torch.equal(
        ops.codes(m[0].weight.detach()).view(torch.uint8), ops.codes(expected).view(torch.uint8)
    )


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_of_plain_weights_quantizes(assign):
    m = qshard.quantize_(model(), qshard.Float8BlockScaling())
    torch.manual_seed(7)
    other = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 8))
    m.load_state_dict(other.state_dict(), assign=assign)
    assert qshard.is_quantized(m[0].weight)
    assert torch.equal(m[0].weight + 0, other[0].weight + 0)
    x = torch.randn(3, 32)
    quantized = qshard.quantize_(other, qshard.Float8BlockScaling())
    assert torch.equal(m(x), quantized(x))


def test_a_failing_call_changes_nothing():
    m = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 8, dtype=torch.float64))
    with pytest.raises(TypeError, match="float32, bfloat16 or float16"):
        qshard.quantize_(m, qshard.Float8BlockScaling())
    assert type(m[0]) is nn.Linear and not qshard.is_quantized(m[0].weight)
    with pytest.raises(ValueError, match="expected a recipe"):
        qshard.quantize_(model(), "float8")
    with pytest.raises(ValueError, match="filter_fn"):
        qshard.quantize_(nn.ReLU(), qshard.Float8BlockScaling())


def test_a_weight_that_is_computed_is_refused():
    m = model()
    nn.utils.parametrizations.weight_norm(m[0])
    with pytest.raises(TypeError, match="weight of 0 is computed"):
        qshard.quantize_(m, qshard.Float8BlockScaling())
    assert not any(qshard.is_quantized(p) for p in m.parameters())


@pytest.mark.parametrize("options", [{}, {"weights": "dynamic"}, {"weight_only": True}], ids=str)
def test_lazy_linears_are_materialized_first(options):
    def lazy():
        return nn.Sequential(nn.Linear(32, 48), nn.LazyLinear(8))

    m, recipe = lazy(), qshard.Float8BlockScaling()
    with pytest.raises(ValueError, match="1, a LazyLinear, has no shape yet; materialize it by a forward"):
        qshard.quantize_(m, recipe, **options)
    assert type(m[0]) is nn.Linear and not qshard.is_quantized(m[0].weight)
    m(torch.ones(2, 32))
    qshard.quantize_(m, recipe, **options)
    qshard.quantize_(lazy(), recipe, filter_fn=lambda _, name: name == "0", **options)(torch.ones(2, 32))
    if not options:
        with pytest.raises(ValueError, match="1, a LazyConv2d, has no shape yet"):
            qshard.quantize_(
                nn.Sequential(nn.Linear(32, 48), nn.LazyConv2d(8, 3)), recipe,
                parameter_fn=lambda _, name: name == "1.weight",
            )


@pytest.mark.parametrize("keep_master", [True, False])
def test_plain_weights_are_freed_one_by_one(keep_master, monkeypatch):
    m = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    plain = [StorageWeakRef(layer.weight.untyped_storage()) for layer in m]
    quantize_like, alive = qshard.model.quantize.quantize_like, []

    def counting(*args):
        alive.append(sum(not weight.expired() for weight in plain))
        return quantize_like(*args)

    monkeypatch.setattr(qshard.model.quantize, "quantize_like", counting)
    qshard.quantize_(m, qshard.Float8CurrentScaling(), keep_master=keep_master)
    assert alive == [6, 5, 4, 3, 2, 1] and all(weight.expired() for weight in plain)


def test_report_counts_bytes_by_plane():
    m = qshard.quantize_(model(), qshard.Float8BlockScaling())
    weight = next(row for row in qshard.report(m) if row.name == "0.weight")
    assert (weight.image, weight.master, weight.grid, weight.pending) == (48 * 32, 4 * 48 * 32, 4, 0)
    assert weight.format == "float8_blockwise" and weight.gathered == 0
    text = str(qshard.report(m))
    assert "0.weight" in text and "all-gathered per forward" in text


def test_trace_fallbacks_counts_dequantizing_operators():
    m = qshard.quantize_(model(), qshard.Float8BlockScaling())
    with qshard.trace_fallbacks() as counts:
        m(torch.randn(3, 32))
    assert counts == {}
    with qshard.trace_fallbacks() as counts:
        m[0].weight.norm()
    assert sum(counts.values()) == 1 and next(iter(counts)).startswith("aten::")
