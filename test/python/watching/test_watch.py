"""qshard.watch beside plain torch: one process, each format, inputs of any kind."""

import json
import math

import pytest
import torch
from helpers import fit
from reference import emulation, quantize, statistics
from reference.formats import FORMATS
from reference.layout import Layout
from watched_models import assert_says

import qshard
from qshard.watching.statistics import OPERANDS

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
RECIPES = (
    qshard.Float8CurrentScaling(emulate=True),
    qshard.Float8CurrentScaling(use_power_2_scales=False, emulate=True),
    qshard.DelayedScaling(emulate=True),
    qshard.Float8RowwiseScaling(emulate=True),
    qshard.Float8RowwiseScaling(use_f32_scales=True, emulate=True),
    qshard.Float8BlockScaling(emulate=True),
    qshard.Float8BlockScaling(use_f32_scales=True, emulate=True),
    qshard.MXFP8BlockScaling(emulate=True),
    qshard.MXFP8BlockScaling(weight_block=(1, 32), emulate=True),
    qshard.NVFP4BlockScaling(emulate=True),
    qshard.NVFP4BlockScaling(disable_2d_quantization=True, emulate=True),
)


def reference_format(recipe):
    return FORMATS[recipe.format.partition("[")[0]]


def linear(recipe, n, k, device="cpu", weight=None):
    """A quantized nn.Linear in a model."""
    module = torch.nn.Linear(k, n, device=device)
    if weight is not None:
        with torch.no_grad():
            module.weight.copy_(weight)
    return qshard.quantize_(torch.nn.Sequential(module), recipe)


def step(model, optimizer, *batches):
    """An optimizer step over micro-batches of (input, gradient of the output)."""
    for x, grad in batches:
        device = model[0].weight.device
        model(x.to(device).requires_grad_()).backward(grad.to(device))
    optimizer.step()
    optimizer.zero_grad()


def uneven(m, k, seed=0, spread=24):
    """Values of many magnitudes, with zeros: some underflow under any scale."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator) * 2.0 ** -torch.randint(0, spread, (m, k), generator=generator)
    x[torch.rand(m, k, generator=generator) < 0.1] = 0
    return x


def parts(x, *args, **kwargs):
    return (x, *statistics.parts_of_rows(x, *args, **kwargs))


def statistics_of_one(recipe, weight, batches, device, seed=7):
    """The WeightStatistics of a step of one linear."""
    model = linear(recipe, *weight.shape, device, weight)
    with qshard.watch(model, every=1) as watch:
        torch.manual_seed(seed)
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), *batches)
    return watch.last["0.weight"]


def words_of(format, count, device, seed=7):
    """What each gradient of a step is rounded by: dgrad's rows first, then wgrad's columns."""
    if format.code_bits != 4:
        return [None] * count
    torch.manual_seed(seed)
    drawn = [torch.randint(2**31 - 1, (3,), dtype=torch.int32, device=device).cpu() for _ in range(2 * count)]
    return drawn[::2]


def check(got, weight, batches, recipe, device):
    format = reference_format(recipe)
    assert (got.name, got.format, got.step) == ("0.weight", recipe.format, 0)
    assert_says(got.weight, [(weight, *statistics.parts_of_weight(weight, format))], format.code_dtype)
    assert_says(got.input, [parts(x, format) for x, _ in batches], format.code_dtype)
    if format.row_scale and format.block[0] == 1:
        assert got.gradient is None  # dgrad multiplies values
        return
    folded = [emulation.folded(grad, weight, format) for _, grad in batches]
    words = words_of(format, len(batches), device)
    rows = [parts(grad, format, True, drawn) for grad, drawn in zip(folded, words)]
    assert_says(got.gradient, rows, format.grad_dtype)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m, n, k", [(37, 48, 200), (1, 16, 8), (130, 272, 136), (64, 64, 256)])
@on_devices
@pytest.mark.pairwise
def test_statistics_are_those_of_plain_torch(recipe, dtype, m, n, k, device):
    n = fit(recipe.format, n)
    x, grad = uneven(m, k).to(dtype), (uneven(m, n, 1) * 2.0**-8).to(dtype)
    weight = uneven(n, k, 2)
    got = statistics_of_one(recipe, weight, [(x, grad)], device)
    check(got, weight, [(x, grad)], recipe, device)
    assert got.input.underflow > 0 or m == 1


@pytest.mark.parametrize("recipe", (RECIPES[0], RECIPES[5], RECIPES[7], RECIPES[9]), ids=lambda recipe: recipe.format)
@on_devices
def test_micro_batches_are_counted_together(recipe, device):
    batches = [(uneven(m, 64, m), uneven(m, 32, m + 1)) for m in (48, 16, 3)]
    weight = uneven(32, 64, 2)
    check(statistics_of_one(recipe, weight, batches, device), weight, batches, recipe, device)


@pytest.mark.parametrize("recipe", (RECIPES[0], RECIPES[3], RECIPES[5], RECIPES[7]), ids=lambda recipe: recipe.format)
@on_devices
def test_infinite_and_nan_values_are_counted_apart(recipe, device):
    x, grad, weight = uneven(40, 160), uneven(40, 32, 1), uneven(32, 160, 2)
    x[3, 5], x[4, 6], x[39, 159], grad[2, 2] = math.inf, -math.inf, math.inf, math.nan
    got = statistics_of_one(recipe, weight, [(x, grad)], device)
    check(got, weight, [(x, grad)], recipe, device)
    assert got.input.amax == math.inf and math.isnan(got.gradient.amax)
    assert got.input.nonfinite >= 3 / x.numel() and got.gradient.nonfinite >= 1 / grad.numel()


@on_devices
def test_zeros_have_no_error_and_no_rows_have_no_statistics(device):
    recipe, weight = RECIPES[5], torch.zeros(32, 64)
    got = statistics_of_one(recipe, weight, [(torch.zeros(8, 64), torch.zeros(8, 32))], device)
    for operand in OPERANDS:
        zeros = getattr(got, operand)
        assert (zeros.amax, zeros.relative_error, zeros.mse, zeros.underflow) == (0, 0, 0, 0)
        assert zeros.snr_db == math.inf
    got = statistics_of_one(recipe, weight, [(torch.zeros(0, 64), torch.zeros(0, 32))], device)
    assert got.weight is not None and got.input is got.gradient is None


@on_devices
def test_delayed_scaling_saturates_what_grows(device):
    """The scale is that of the step before, and what lies beyond its largest code is counted."""
    model = linear(RECIPES[2], 32, 64, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with qshard.watch(model, every=1) as watch:
        for factor in (1, 8):
            x, grad = factor * uneven(16, 64), uneven(16, 32, 1)
            step(model, optimizer, (x, grad))
        format = reference_format(RECIPES[2])
    got = watch.last["0.weight"].input
    amax = uneven(16, 64).abs().max()
    assert_says(got, [parts(x, format, amax=amax)], format.code_dtype)
    assert got.saturated > 0


def test_bytes_are_those_of_codes_and_scales():
    weight = uneven(32, 200)
    for recipe, of_weight, of_input in (
        (RECIPES[0], 32 * 208 + 4, 16 * 208 + 4),
        (RECIPES[5], 32 * 208 + 4 * 2, 16 * 208 + 4 * 16 * 2),
        (RECIPES[7], 32 * 224, 16 * 224),
        (RECIPES[9], 32 * 128 + 4, 16 * 128 + 4),
    ):
        got = statistics_of_one(recipe, weight, [(uneven(16, 200), uneven(16, 32))], "cpu")
        assert (got.weight.bytes, got.input.bytes) == (of_weight, of_input), recipe


# --------------------------------------------------------------------------- steps, and what is not sampled


def losses_and_calls(every=None, steps=4, to=None, **kwargs):
    """Weights after some steps, and how often each operator was called in each."""
    torch.manual_seed(0)
    model = linear(RECIPES[9], 32, 64)  # draws random words
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watch = qshard.watch(model, every, to, **kwargs) if every else None
    calls = []
    for i in range(steps):
        with torch.profiler.profile() as profile:
            step(model, optimizer, (uneven(8, 64, i), uneven(8, 32, i)))
        calls.append({event.key: event.count for event in profile.key_averages()})
    if watch is not None:
        watch.remove()
    return model[0].weight.detach().clone(), calls


def test_a_watch_changes_no_bit_and_no_call_of_other_steps():
    plain, calls = losses_and_calls()
    steps = []
    watched, watched_calls = losses_and_calls(4, to=lambda number, found: steps.append(number), step=3)
    assert torch.equal(plain, watched) and steps == [4]
    assert watched_calls[2:] == calls[2:]  # steps 5 and 6; 3 counts the weights for the next
    assert watched_calls[1] != calls[1]


def test_statistics_arrive_in_a_function_a_file_and_tensorboard(tmp_path, monkeypatch):
    class SummaryWriter:
        scalars = {}

        def add_scalar(self, tag, value, step):
            self.scalars[tag, step] = value

    tensorboard = type(torch)("torch.utils.tensorboard")  # the package may not be there
    tensorboard.SummaryWriter = SummaryWriter
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", tensorboard)
    file, called = tmp_path / "watched.jsonl", {}
    for to in (file, str(file), SummaryWriter(), called.__setitem__):
        losses_and_calls(2, to=to)
    assert list(called) == [0, 2] and list(called[2]) == ["0.weight"]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["name"], line["step"]) for line in lines] == 2 * [("0.weight", 0), ("0.weight", 2)]
    of_input = called[2]["0.weight"].input
    assert lines[1]["input"] == vars(of_input) and lines[1]["gradient"] is not None
    assert SummaryWriter.scalars["0.weight/input/snr_db", 2] == of_input.snr_db
    assert len(SummaryWriter.scalars) == 2 * 3 * len(vars(of_input))


def test_json_has_null_for_what_is_not_finite(tmp_path):
    model, file = linear(RECIPES[5], 16, 16, weight=torch.zeros(16, 16)), tmp_path / "watched.jsonl"
    with qshard.watch(model, every=1, to=file):
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), (torch.full((8, 16), math.nan), torch.ones(8, 16)))
    (line,) = map(json.loads, file.read_text().splitlines())
    assert line["weight"]["snr_db"] is None and line["input"]["amax"] is None
    assert line["input"]["nonfinite"] == 1


def test_the_report_shows_the_last_statistics():
    model = linear(RECIPES[5], 32, 64)
    plain = str(qshard.report(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with qshard.watch(model, every=2) as watch:
        assert str(qshard.report(model)) == plain
        for i in range(4):
            step(model, optimizer, (uneven(8, 64, i), uneven(8, 32, i)))
        report = qshard.report(model[0])
        assert report.statistics["weight"].input == watch.last["0.weight"].input
        assert report.statistics["weight"].step == 2
        assert "SNR dB" in str(report) and f"{watch.last['0.weight'].gradient.snr_db:.1f}" in str(report)
    assert qshard.report(model).statistics == {}


def test_steps_that_dcp_makes_up_are_not_counted():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = linear(RECIPES[5], 32, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = {}
    with qshard.watch(model, every=2, to=found.__setitem__):
        get_optimizer_state_dict(model, optimizer)
        for i in range(3):
            step(model, optimizer, (uneven(8, 64, i), uneven(8, 32, i)))
    assert list(found) == [0, 2]


def test_a_weight_without_a_master_has_no_error_to_measure():
    model = qshard.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 32)), RECIPES[5], keep_master=False)
    with qshard.watch(model, every=1) as watch:
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), (uneven(8, 64), uneven(8, 32)))
    assert watch.last["0.weight"].weight is None and watch.last["0.weight"].input is not None


def test_what_is_not_quantized_has_no_statistics():
    """A CPU has no GEMM of codes, and without emulate linears multiply values there."""
    model = linear(qshard.Float8BlockScaling(), 32, 64)
    with qshard.watch(model, every=1) as watch:
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), (uneven(8, 64), uneven(8, 32)))
    got = watch.last["0.weight"]
    assert got.input is got.gradient is None and got.weight.relative_error > 0


def test_columns_of_a_weight_with_two_images_are_not_counted():
    """The rowwise image is what forward reads."""
    recipe, weight = RECIPES[8], uneven(32, 64)
    format = reference_format(recipe)
    got = statistics_of_one(recipe, weight, [(uneven(8, 64), uneven(8, 32))], "cpu")
    image, grid = quantize.quantize(weight, Layout.whole(format, 32, 64).rowwise)
    read = quantize.dequantize(image, grid, Layout.whole(format, 32, 64).rowwise, torch.float32)
    assert math.isclose(got.weight.mse, (weight.double() - read.double()).square().mean(), rel_tol=1e-12)


class GatedMLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = torch.nn.Linear(64, 128, bias=False), torch.nn.Linear(64, 128, bias=False)
        self.down = torch.nn.Linear(128, 64, bias=False)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("recipe", (RECIPES[0], RECIPES[3], RECIPES[5], RECIPES[7]), ids=lambda recipe: recipe.format)
@on_devices
def test_fused_steps_say_what_separate_linears_say(recipe, device):
    """Their kernels write no values of inner inputs and gradients."""
    qshard.fuse.register(GatedMLP, qshard.fuse.GatedMLP("gate", "up", "down", torch.nn.functional.silu))
    said = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(GatedMLP()).to(device)
        if fused:
            assert qshard.fuse_(model)
        qshard.quantize_(model, recipe)
        with qshard.watch(model, every=1) as watch:
            x = uneven(48, 64).to(device).requires_grad_()
            model(x).backward(uneven(48, 64, 1).to(device))
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        said.append(watch.last)
    assert len(said[0]) == 3
    for separate, fused in zip(said[0].values(), said[1].values()):
        for operand in OPERANDS:
            want, got = vars(getattr(separate, operand)), vars(getattr(fused, operand))
            assert all(math.isclose(got[key], want[key], rel_tol=1e-11) for key in want), (fused, operand)


# ------------------------------------------------------------------------------------------------ errors


def test_refuses_what_it_cannot_watch():
    plain, model = torch.nn.Sequential(torch.nn.Linear(8, 8)), linear(RECIPES[5], 16, 16)
    for every in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="every must be an integer of at least 1"):
            qshard.watch(model, every=every)
    with pytest.raises(ValueError, match="step must be an integer of at least 0"):
        qshard.watch(model, step=-1)
    with pytest.raises(TypeError, match="give the path of a file"):
        qshard.watch(model, to=3)
    with pytest.raises(ValueError, match="no quantized weight that is trained"):
        qshard.watch(plain)
    with torch.device("meta"):
        on_meta = qshard.quantize_(torch.nn.Sequential(torch.nn.Linear(16, 16)), RECIPES[5])
    with pytest.raises(ValueError, match="0.weight is on the meta device"):
        qshard.watch(on_meta)
    first = qshard.watch(model)
    with pytest.raises(RuntimeError, match="another watch"):
        qshard.watch(model)
    first.remove()
    first.remove()
    qshard.watch(model).remove()


def test_names_frozen_weights():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    qshard.quantize_(model, RECIPES[5])
    model[0].weight.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"not watched: 0.weight \(frozen\)"):
        qshard.watch(model).remove()
    model[1].weight.requires_grad_(False)
    with pytest.raises(ValueError, match="no quantized weight that is trained"):
        qshard.watch(model)


def test_a_watch_ends_with_its_model():
    import gc

    from qshard._runtime.hooks import of_package

    gc.collect()
    model = linear(RECIPES[5], 16, 16)
    qshard.watch(model)
    assert of_package.take_samples is not None
    del model
    gc.collect()
    other = linear(RECIPES[5], 16, 16)
    step(other, torch.optim.SGD(other.parameters(), lr=0.1), (uneven(8, 16), uneven(8, 16)))
    assert of_package.take_samples is None
