"""emulate=True: linears compute what GEMMs of codes compute, on any device."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, ceil_div, fit, round_up, shown
from nn_helpers import output_and_gradients
from reference import emulation
from reference.formats import FORMATS

import qshard
from qshard._runtime.classes import Process
from qshard.formats import info_of

BUDGET_S = 60  # the oracle is slow, and a case of each recipe compiles a model
RECIPES = (
    qshard.Float8CurrentScaling(emulate=True),
    qshard.Float8CurrentScaling(use_power_2_scales=False, emulate=True),
    qshard.DelayedScaling(emulate=True),
    qshard.DelayedScaling(fp8_format="E4M3", emulate=True),
    qshard.Float8RowwiseScaling(emulate=True),
    qshard.Float8RowwiseScaling(use_f32_scales=True, emulate=True),
    qshard.Float8BlockScaling(emulate=True),
    qshard.Float8BlockScaling(x_block_scaling_dim=1, emulate=True),
    qshard.Float8BlockScaling(use_f32_scales=True, emulate=True),
    qshard.Float8BlockScaling(use_f32_scales=True, x_block_scaling_dim=1, emulate=True),
    qshard.MXFP8BlockScaling(emulate=True),
    qshard.MXFP8BlockScaling(weight_block=(1, 32), emulate=True),
    qshard.NVFP4BlockScaling(emulate=True),
    qshard.NVFP4BlockScaling(disable_2d_quantization=True, emulate=True),
    qshard.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, emulate=True),
    qshard.NVFP4BlockScaling(four_over_six=True, emulate=True),
    qshard.NVFP4BlockScaling(disable_2d_quantization=True, four_over_six=True, emulate=True),
)
BASIC = tuple(r for r in RECIPES if r == type(r)(emulate=True))
ops = torch.ops.qshard
by_format = {"ids": lambda recipe: recipe.format}
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def reference_format(recipe):
    format = FORMATS[recipe.format.partition("[")[0]]
    if getattr(recipe, "fp8_format", "") == "E4M3":
        format = type(format)(format.name, format.block, format.power_of_two_scales)
    if getattr(recipe, "four_over_six", False) and recipe.disable_2d_quantization:
        format = replace(format, four_over_six=True)
    return format


def reads_plain_in_dgrad(format):
    """Blocks of one row have no transpose: dgrad multiplies values, on the target too."""
    return format.row_scale is not None and format.block[0] == 1


def without_emulation(recipe):
    return type(recipe)(**(vars(recipe) | {"emulate": False}))


def linear(weight, recipe, bias=None, device="cpu"):
    module = torch.nn.Linear(*weight.t().shape, bias=bias is not None, device=device)
    with torch.no_grad():
        module.weight.copy_(weight)
        if bias is not None:
            module.bias.copy_(bias)
    return qshard.quantize_(torch.nn.Sequential(module), recipe)[0]


def run(module, x, grad):
    """Output, and gradients of input, weight and bias."""
    device = module.weight.device
    x = x.clone().to(device).requires_grad_()
    y = module(x)
    y.backward(grad.to(device))
    got = [y.detach().cpu(), x.grad.cpu(), module.weight.grad.cpu()]
    return got if module.bias is None else [*got, module.bias.grad.cpu()]


def operands(x, weight, grad, recipe, seed=0, device="cpu"):
    """The fp64 factors of forward, dgrad and wgrad, each (rows, contracted)."""
    format = reference_format(recipe)
    words = [None, None]
    plain = reads_plain_in_dgrad(format)
    of_nvfp4 = {"four_over_six": getattr(recipe, "four_over_six", False)}
    hadamard = not getattr(recipe, "disable_rht", False)
    if format.code_bits == 4 and not recipe.disable_stochastic_rounding:
        # One gradient operand after the other draws from torch's generator.
        torch.manual_seed(seed)
        draws = 1 if plain else 2
        size = dict(size=(3,), dtype=torch.int32, device=device)
        words = [torch.randint(2**31 - 1, **size).cpu() for _ in range(draws)]
        words = [None, *words][-2:]
    square = getattr(recipe, "x_block_scaling_dim", 2) == 2
    meets = emulation.folded(grad, weight, format)
    dgrad = grad.double() if plain else emulation.rows_of(meets, format, True, words[0], **of_nvfp4)
    return (
        (emulation.rows_of(x, format, **of_nvfp4), emulation.weight_of(weight, format)),
        (dgrad, emulation.weight_of(weight, format, columnwise=True).t()),
        (
            emulation.columns_of(grad, format, True, words[1], hadamard=hadamard, **of_nvfp4),
            emulation.columns_of(x, format, square=square, hadamard=hadamard, **of_nvfp4),
        ),
    )


def assert_near(got, a, b, added=0.0):
    """Within 2K 2^-24 of what is added up, and the one rounding to a dtype below fp32."""
    exact = a @ b.t() + added
    sizes = a.abs() @ b.abs().t() + abs(added)
    limit = 2 * a.shape[1] * 2.0**-24 * sizes + torch.finfo(got.dtype).eps / 2 * exact.abs()
    error = (got.double() - exact).abs()
    assert (error <= limit).all(), f"{(error / limit.clamp(min=1e-300)).max():.3g} of the limit"


# ------------------------------------------------------------------------------ the oracle


@pytest.mark.parametrize("recipe", RECIPES, **by_format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m, n, k", [(37, 48, 200), (1, 16, 8), (130, 272, 136)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.pairwise
def test_multiplies_what_the_target_quantizes(recipe, dtype, m, n, k, device):
    torch.manual_seed(m)
    n = fit(recipe.format, n)
    x, grad = torch.randn(m, k).to(dtype), (torch.randn(m, n) * 2.0**-8).to(dtype)
    weight, bias = torch.randn(n, k), torch.randn(n)
    module = linear(weight, recipe, bias, device)
    torch.manual_seed(5)
    y, grad_input, grad_weight, grad_bias = run(module, x, grad)
    forward, dgrad, wgrad = operands(x, weight, grad, recipe, 5, device)
    assert (y.dtype, grad_input.dtype, grad_weight.dtype) == (dtype, dtype, torch.float32)
    assert_near(y, *forward, bias.double())
    if not reads_plain_in_dgrad(reference_format(recipe)):
        assert_near(grad_input, *dgrad)
    elif dtype == torch.float32:
        torch.testing.assert_close(grad_input, (dgrad[0] @ dgrad[1].t()).float())
    assert_near(grad_weight, *wgrad)
    torch.testing.assert_close(grad_bias, grad.float().sum(0), rtol=2e-2, atol=1e-3)


def whole_numbers(rows, cols, unit=1, largest=7, steps=(0, 1, 2, 3, 4, 5, 6, 7)):
    """Values that codes hold, with the largest of them in each run of 16 of a row or a column."""
    steps = torch.tensor(steps)
    signs = torch.randint(0, 2, (rows, cols)) * 2 - 1
    values = signs * steps[torch.randint(len(steps), (rows, cols))]
    i, j = torch.arange(rows)[:, None], torch.arange(cols)
    return unit * torch.where((i + j) % 16 == 0, largest, values).float()


def values_of(recipe, rows, cols):
    if info_of(recipe.format).outer_scale:  # amax 2688 gives scales of 1 and 448, or of 1.75 and 256
        return whole_numbers(rows, cols, 224, 12, (0, 1, 2, 3, 4, 6, 8, 12))
    return whole_numbers(rows, cols)


@pytest.mark.parametrize("recipe", RECIPES, **by_format)
def test_sums_that_are_exact_have_the_bits_of_plain_torch(recipe):
    torch.manual_seed(0)
    m, n, k = 96, 64, 160
    x, weight, grad = (values_of(recipe, *shape) for shape in ((m, k), (n, k), (m, n)))
    y, grad_input, grad_weight = run(linear(weight, recipe), x, grad)
    assert torch.equal(y, x @ weight.t())
    assert torch.equal(grad_input, grad @ weight)
    if getattr(recipe, "disable_rht", "nvfp4" not in recipe.format):
        assert torch.equal(grad_weight, grad.t() @ x)
        return
    # Values that are exact once the random Hadamard transform has mixed 16 tokens.
    unmix = emulation.transposed(torch.eye(16), hadamard=True)[:, :16].t().double()
    inverse = torch.linalg.inv(unmix)
    x, grad = ((inverse @ v.double().unflatten(0, (-1, 16))).flatten(0, 1).float() for v in (x, grad))
    _, _, grad_weight = run(linear(weight, recipe), x, grad)
    assert torch.equal(grad_weight, (grad.double().t() @ x.double()).float())


@pytest.mark.parametrize("recipe", BASIC, **by_format)
@pytest.mark.parametrize("of_input, of_weight", [(-90, 60), (100, -110), (-135, 100)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
# Formats whose scales are no powers of two would need a scale above those of fp32.
@pytest.mark.only_where(
    lambda recipe, of_input: of_input != -135 or reference_format(recipe).power_of_two_scales
)
def test_values_of_any_size_are_exact(recipe, of_input, of_weight, device):
    """2^-135 is a subnormal number, and less than bfloat16 holds."""
    torch.manual_seed(0)
    x, weight = values_of(recipe, 32, 160), values_of(recipe, 64, 160)
    module = linear(weight * 2.0**of_weight, recipe, device=device)
    with torch.no_grad():
        y = module((x * 2.0**of_input).to(device))
    assert torch.equal(y.cpu(), (x @ weight.t()) * 2.0 ** (of_input + of_weight))


@pytest.mark.parametrize("recipe", BASIC, **by_format)
def test_bfloat16_results_are_rounded_once(recipe):
    torch.manual_seed(0)
    x, weight = values_of(recipe, 32, 160), values_of(recipe, 64, 160)
    bias = torch.randint(-3, 4, (64,)) * 2.0**-3
    y = linear(weight, recipe, bias)(x.bfloat16())
    assert torch.equal(y, (x @ weight.t() + bias).bfloat16())


def test_delayed_scaling_scales_by_earlier_steps():
    torch.manual_seed(0)
    recipe = qshard.DelayedScaling(margin=1, emulate=True)
    format = reference_format(recipe)
    module = linear(torch.randn(32, 48), recipe)
    optimizer = torch.optim.SGD(module.parameters(), 0.0)
    amaxes = torch.zeros(2)
    for i, size in enumerate((1.0, 0.25, 2.0)):
        x, grad = size * torch.randn(24, 48), size * torch.randn(24, 32)
        module.zero_grad()
        y, grad_input, grad_weight = run(module, x, grad)
        own = torch.stack([x.abs().max(), grad.abs().max()])
        in_use = 2 * (amaxes if i else own)
        weight = shown(module.weight.detach()).double()
        x_codes = emulation.by_amax(x, format, torch.float8_e4m3fn, in_use[0])
        grad_codes = emulation.by_amax(grad, format, torch.float8_e5m2, in_use[1])
        assert_near(y, x_codes, weight)
        assert_near(grad_input, grad_codes, weight.t())
        assert_near(grad_weight, grad_codes.t(), x_codes.t())
        amaxes = torch.maximum(amaxes, own)
        optimizer.step()


@pytest.mark.parametrize("recipe", BASIC, **by_format)
def test_autocast_casts_the_input_alone(recipe):
    """Also where users call backward within it."""
    torch.manual_seed(0)
    module = linear(torch.randn(32, 48), recipe)
    x, grad = torch.randn(24, 48), torch.randn(24, 32).bfloat16()
    torch.manual_seed(1)
    expected = run(module, x.bfloat16(), grad)
    module.zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, grad_input, grad_weight = run(module, x, grad)
    assert torch.equal(y, expected[0]) and torch.equal(grad_weight, expected[2])
    assert torch.equal(grad_input, expected[1].float())


@pytest.mark.parametrize("recipe", BASIC, **by_format)
def test_not_a_number_reaches_what_it_is_added_to(recipe):
    x, weight = torch.randn(20, 64), torch.randn(32, 64)
    x[3, 5] = float("nan")
    y = linear(weight, recipe)(x)
    assert y[3].isnan().all()
    assert not y[[i for i in range(20) if i != 3]].isnan().any()


@pytest.mark.parametrize("recipe", RECIPES, **by_format)
def test_empty_and_odd_shapes(recipe):
    rows = fit(recipe.format, 48)
    module = linear(torch.randn(rows, 40), recipe)
    for shape in ((40,), (0, 40), (2, 3, 40), (2, 0, 40)):
        x = torch.randn(shape, requires_grad=True)
        y = module(x)
        y.sum().backward()
        assert y.shape == (*shape[:-1], rows) and x.grad.shape == shape
    strided = torch.randn(40, 6).t()
    assert torch.equal(module(strided), module(strided.contiguous()))


# --------------------------------------------------------------- what else linears are asked for


@pytest.mark.parametrize("recipe", BASIC, **by_format)
def test_adds_to_gradients(recipe):
    """To .grad with the bits of autograd's sum."""
    torch.manual_seed(0)
    module = linear(torch.randn(32, 48), recipe)
    x, grad = torch.randn(24, 48), torch.randn(24, 32)
    torch.manual_seed(1)
    once = run(module, x, grad)[2].clone()
    torch.manual_seed(1)
    twice = run(module, x, grad)[2]
    assert torch.equal(twice, once + once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", BASIC, **by_format)
def test_adds_to_a_given_sum(recipe, dtype):
    torch.manual_seed(0)
    q = ops.quantize(torch.randn(32, 48), recipe.format)
    x, grad = torch.randn(24, 48), torch.randn(24, 32)
    sum = torch.randn(32, 48).to(dtype)
    torch.manual_seed(1)
    made = ops.linear_backward(grad, q, x, False, True, True, grad_dtype=dtype)
    expected = sum + made[1]
    torch.manual_seed(1)
    grad_input = ops.linear_backward_accumulate(grad, q, x, False, True, sum)
    assert torch.equal(sum, expected) and torch.equal(grad_input, made[0])


@pytest.mark.parametrize("base", ["float8_tensorwise", "float8_rowwise", "float8_blockwise"])
def test_multiplies_codes_that_were_made_before(base):
    format = f"{base}[emulate]"
    q = ops.quantize(torch.randn(32, 48), format)
    x, grad = torch.randn(24, 48), torch.randn(24, 32)
    rows, columns = ops.quantize_input(x, format, True, True)
    y, _ = ops.linear_forward(x, q, None, False)
    assert torch.equal(ops.linear_forward(x, q, None, False, input_rows=rows)[0], y)
    same, saved = ops.linear_forward(x, q, None, True)
    assert torch.equal(same, y) and torch.equal(saved, columns)
    made = ops.linear_backward(grad, q, x, False, True, True)
    assert_same(ops.linear_backward(grad, q, columns, True, True, True)[1], made[1])


@pytest.mark.parametrize("recipe", BASIC, **by_format)
def test_a_residual_is_added_before_the_rounding(recipe):
    torch.manual_seed(0)
    x, weight = values_of(recipe, 32, 160), values_of(recipe, 64, 160)
    residual = (x @ weight.t()).roll(1).bfloat16()
    q = ops.quantize(weight, recipe.format)
    y = ops.linear(x.bfloat16(), q, residual=residual)
    assert torch.equal(y, (x @ weight.t() + residual).bfloat16())


@pytest.mark.parametrize("recipe", BASIC, **by_format)
def test_fused_modules_are_made_of_such_linears(recipe):
    torch.manual_seed(0)
    mlp = qshard.nn.LayerNormMLP(64, 96, activation="swiglu", bias=False)
    qshard.quantize_(mlp, recipe)
    x = torch.randn(20, 64, requires_grad=True)
    plain = x.detach().clone().requires_grad_()
    torch.manual_seed(1)
    y = mlp(x)
    y.square().sum().backward()
    torch.manual_seed(1)
    normed = F.layer_norm(plain, (64,), mlp.layer_norm_weight, mlp.layer_norm_bias)
    gate, up = ops.linear(normed, mlp.fc1_weight, format=mlp._qshard.weight_format).chunk(2, -1)
    expected = ops.linear(F.silu(gate) * up, mlp.fc2_weight, format=mlp._qshard.weight_format)
    expected.square().sum().backward()
    assert torch.equal(y, expected)
    torch.testing.assert_close(x.grad, plain.grad)


@pytest.mark.parametrize("recipe", BASIC, **by_format)
def test_compiled_code_has_the_bits_of_eager(recipe):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    qshard.quantize_(model, recipe)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(20, 48)

    for got, expected in zip(*(output_and_gradients(model, run, x) for run in (compiled, model))):
        assert torch.equal(got, expected)


# ------------------------------------------------------------------------------------- on a GPU


@needs_cuda
@pytest.mark.parametrize("recipe", [r for r in RECIPES if info_of(r.format).gemm.kind == "packed"], **by_format)
def test_is_near_the_gemms_of_codes(recipe):
    """Whose accumulators keep about 14 bits on Hopper."""
    real = without_emulation(recipe)
    if reason := Process.why_dequantized(torch.device("cuda"))[real.format.partition("[")[0]]:
        pytest.skip(f"needs a GPU with GEMMs of {real.format}: {reason}")
    torch.manual_seed(0)
    x, grad, weight = torch.randn(272, 1024), torch.randn(272, 512) * 2.0**-8, torch.randn(512, 1024)
    made = [run(linear(weight, r, device="cuda"), x, grad) for r in (recipe, real)]
    factors = operands(x, weight, grad, recipe)
    for name, got, of_codes, (a, b) in zip(("y", "dgrad", "wgrad"), *made, factors):
        error = (got.double() - of_codes.double()).abs()
        assert (error <= 2.0**-12 * (a.abs() @ b.abs().t())).all(), name


@needs_cuda
@pytest.mark.parametrize("recipe", [r for r in RECIPES if info_of(r.format).gemm.kind == "packed"], **by_format)
@pytest.mark.parametrize("m, k", [(37, 200), (130, 136), (256, 512)])
# With delayed scaling each linear scales by a history of its own.
@pytest.mark.only_where(lambda recipe: "delayed" not in recipe.format)
def test_codes_of_the_cpu_are_those_of_the_gpu(recipe, m, k):
    x = torch.randn(m, k)
    x[m // 2, k // 2] = float("nan")
    made = [ops.quantize_input(x.to(device), recipe.format, True, True) for device in ("cpu", "cuda")]
    row_blocks, col_blocks = ceil_div(m, 128), ceil_div(k, 128)
    padded_k, padded_m = round_up(k, 16), round_up(m, 16)
    scale_mode = info_of(recipe.format).activations.packed_rows
    if scale_mode == "tensor":
        used = m * padded_k + 4, padded_k * 128 * row_blocks + 4
    elif scale_mode == "row":
        used = m * (padded_k + 4), padded_k * (128 * row_blocks + 4)
    else:
        is_square = getattr(recipe, "x_block_scaling_dim", 2) == 2
        scales = col_blocks * round_up(row_blocks, 4) if is_square else row_blocks * padded_k
        used = padded_m * (padded_k + 4 * col_blocks), padded_k * 128 * row_blocks + 4 * scales
    for on_cpu, on_gpu, size in zip(*made, used):
        assert torch.equal(on_cpu[:size], on_gpu.cpu()[:size])


@needs_cuda
@pytest.mark.parametrize("recipe", BASIC, **by_format)
def test_can_be_captured(recipe):
    torch.manual_seed(0)
    weight, x = torch.randn(64, 96), torch.randn(32, 96, device="cuda")
    module = linear(weight, recipe, device="cuda").requires_grad_(False)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        module(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x)
    x.copy_(torch.randn(32, 96))
    graph.replay()
    torch.cuda.synchronize()
    format = reference_format(recipe)
    assert_near(y.cpu(), emulation.rows_of(x.cpu(), format), emulation.weight_of(weight, format))
