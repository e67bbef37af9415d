"""On a Hopper GPU: bits equal the CPU's, linears run in FP8, a step never waits for the host."""

import re

import pytest
import torch
import torch.nn.functional as F
from helpers import FORMATS, are_codes_of, fit, has_row_scales, has_two_images, shown_to_dgrad
from nn_helpers import relative_error
from reference.activations import (
    expand_1x128,
    expand_128x128,
    quantize_1x128,
    quantize_128x128,
    quantize_rowwise,
    quantize_tensorwise,
)
from test_input_codes import FusedNorm

import qshard
from qshard._runtime.classes import TensorState
from qshard.formats import info_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ops = torch.ops.qshard
FP8_RECIPES = (
    qshard.Float8CurrentScaling(),
    qshard.DelayedScaling(),
    qshard.Float8RowwiseScaling(),
    qshard.Float8RowwiseScaling(use_f32_scales=True),
    qshard.Float8BlockScaling(),
    qshard.Float8BlockScaling(x_block_scaling_dim=1),
)
FP8_FORMATS = [recipe.format for recipe in FP8_RECIPES]  # those with GEMMs on Hopper
RECIPES = (*FP8_RECIPES, qshard.MXFP8BlockScaling(), qshard.NVFP4BlockScaling())


def codes_of(q):
    codes = ops.codes(q.detach()).view(torch.uint8).cpu()
    if not has_two_images(ops.format(q)):
        return codes
    return torch.cat([codes, ops.columnwise_codes(q.detach()).view(torch.uint8).cpu()], 1)


def scales_of(q):
    scales = [ops.scale_inv(q)]
    if has_two_images(ops.format(q)):
        scales.append(ops.columnwise_scale_inv(q))
    return torch.cat([s.cpu().contiguous().view(torch.uint8).flatten() for s in scales])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("keep_master", [False, True])
def test_updates_on_cuda_equal_updates_on_cpu(format, keep_master):
    """The same optimizer arithmetic by hand, so that only qshard's kernels are compared."""
    rows = fit(format, 300)
    w = torch.randn(rows, 200)
    qs = [ops.quantize(w.to(device), format, keep_master=keep_master) for device in ("cpu", "cuda")]
    for step in range(3):
        delta = torch.randn(rows, 200) * 2.0**-7
        for q in qs:
            q.add_(delta.to(q.device))
            ops.flush([q])
        assert torch.equal(codes_of(qs[0]), codes_of(qs[1])), step
        assert torch.equal(scales_of(qs[0]), scales_of(qs[1])), step


@pytest.mark.parametrize("format", FORMATS)
def test_moves_between_devices_keep_the_bits(format):
    w = torch.randn(fit(format, 130), 72)
    q = ops.quantize(w, format, keep_master=True)
    there = q.cuda()
    back = there.cpu()
    lazy = q.to("cuda", non_blocking=True)
    for moved in (there, back, lazy):
        assert ops.is_quantized(moved) and torch.equal(codes_of(moved), codes_of(q))
        assert torch.equal((moved + 0).cpu(), w)
    pinned = q.pin_memory()
    assert pinned.is_pinned() and torch.equal(codes_of(pinned), codes_of(q))


@pytest.mark.parametrize("keep_master", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_a_copy_that_is_under_way_has_what_was_written_before(format, keep_master):
    """Through the memory's address, of which the tensor learns by its counter; not what is written after."""
    w = torch.randn(fit(format, 130), 72)
    q = ops.quantize(w, format, keep_master=keep_master)
    plane = ops.master(q) if keep_master else ops.codes(q)
    plane.view(torch.uint8)[:3].zero_()
    before = q * 1
    lazy = q.to("cuda", non_blocking=True)
    q.mul_(3)
    torch.cuda.synchronize()
    assert torch.equal((lazy * 1).cpu(), before)


def quantized(x, format, dtype=torch.float8_e4m3fn):
    """x as the GEMM sees it, in float64: blocks of 128 along the last dim, a scale for each row, or one."""
    activations = info_of(format).activations
    pow2 = activations.power_of_two_scales
    if activations.packed_rows == "1x128":
        codes, scale_inv = quantize_1x128(x.cpu(), dtype, pow2)
        scale_inv = expand_1x128(scale_inv, x.shape[1])
    elif activations.packed_rows == "row":
        codes, scale_inv = quantize_rowwise(x.cpu(), dtype, pow2)
        scale_inv = scale_inv[:, None]
    else:
        codes, scale_inv = quantize_tensorwise(x.cpu(), dtype, pow2)
    return codes.view(dtype).double() * scale_inv.double()


def quantized_for_wgrad(x, format):
    """The transpose of an input x as wgrad sees it."""
    x_t = x.cpu().t().contiguous()
    if info_of(format).activations.packed_input_columns != "128x128":
        return quantized(x_t, format)
    codes, scale_inv = quantize_128x128(x_t)
    return codes.view(torch.float8_e4m3fn).double() * expand_128x128(scale_inv, *x_t.shape).double()


def assert_near(actual, expected, dtype, format=""):
    """Equal products, summed in another order and rounded once to `dtype`. Hopper's FP8 GEMMs keep about 14
    bits while they add, and cuBLASLt's with scales of rows add more products so than its others."""
    error = (actual.cpu().double() - expected).norm() / expected.norm()
    has_row_gemm = format and info_of(format).gemm.scale_mode == "row"
    of_fp32 = 5e-4 if has_row_gemm else 2e-4
    assert error < {torch.float32: of_fp32, torch.bfloat16: 4e-3, torch.float16: 1e-3}[dtype], error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("format", FP8_FORMATS)
@pytest.mark.parametrize(
    "m,n,k", [(256, 384, 512), (128, 128, 128), (100, 144, 100), (1, 16, 16), (33, 272, 129), (17, 160, 1000)]
)
def test_linear_equals_emulated_fp8(m, n, k, format, dtype):
    torch.manual_seed(0)
    w = ops.quantize(torch.randn(n, k, device="cuda") / k**0.5, format)
    values = ops.dequantize(w).cpu().double()
    weight = torch.nn.Parameter(w)
    x = torch.randn(m, k, device="cuda", dtype=dtype, requires_grad=True)
    bias = torch.randn(n, device="cuda", dtype=dtype)
    grad = torch.randn(m, n, device="cuda", dtype=dtype)

    y = F.linear(x, weight, bias)
    expected = quantized(x.detach(), format) @ values.t() + bias.cpu().double()
    assert_near(y.detach(), expected, dtype, format)
    y.backward(grad)
    grad_dtype = info_of(format).activations.gradient_dtype
    if info_of(format).gemm.folds_row_scales:
        folded = grad.cpu().float() * ops.scale_inv(w).cpu().view(-1)
        codes = ops.codes(w).cpu().double()
        assert_near(x.grad, quantized(folded, format) @ codes, dtype, format)
    else:
        assert_near(x.grad, quantized(grad, format, grad_dtype) @ values, dtype)
    grad_t = quantized(grad.t().contiguous(), format, grad_dtype)
    x_t = quantized_for_wgrad(x.detach(), format)
    assert_near(weight.grad, grad_t @ x_t.t(), torch.float32, format)


def test_delayed_linear_scales_activations_by_earlier_steps():
    w = torch.nn.Parameter(ops.quantize(torch.randn(64, 32, device="cuda"), "float8_delayed"))
    x = torch.randn(48, 32, device="cuda", requires_grad=True)
    values = ops.dequantize(w.detach()).cpu().double()
    F.linear(x, w).sum().backward()
    with torch.no_grad():
        w.add_(0)
    ops._flush_after_step([w.detach()], [0], [True], None)
    assert torch.equal(ops.dequantize(w.detach()).cpu().double(), values)

    scale = 448 / x.detach().abs().max().cpu()
    larger = (4 * x.detach()).requires_grad_()  # many elements saturate
    y = F.linear(larger, w)
    codes = (larger.detach().cpu() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert_near(y.detach(), (codes.double() / scale.double()) @ values.t(), torch.float32)
    y.backward(torch.full_like(y, 3.0))  # the gradient of the step before was 1
    assert_near(larger.grad, torch.ones(48, 64).double() @ values, torch.float32)
    history = TensorState(w.detach()).scaling_state()["amax_history"][1:, 0]
    assert history.tolist() == [larger.abs().max().item(), 3.0]


@pytest.mark.parametrize("format", FP8_FORMATS)
def test_linear_runs_in_fp8(format):
    w = torch.nn.Parameter(ops.quantize(torch.randn(256, 256, device="cuda"), format))
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    F.linear(x, w).sum().backward()
    name = format.partition("[")[0] + " "
    lines = [line for line in qshard.backend_report().splitlines() if line.startswith(name)]
    for direction in ("forward", "grad_input", "grad_weight"):
        assert any(f"{direction}: cuBLASLt FP8" in line for line in lines), lines
        assert not any("cuBLASLt has no kernel" in line for line in lines), lines


SPECIAL = (float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3e38, 1e-42)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", ["float8_rowwise", "float8_rowwise_fp32_scale"])
@pytest.mark.parametrize("m,k", [(1, 1), (5, 16), (130, 100), (129, 257), (257, 1000), (128, 128)])
def test_rows_of_activations_have_the_bits_of_the_cpu(m, k, format, dtype):
    """Codes and scales of tokens and of features, and those of gradients that a weight's scales multiply."""
    torch.manual_seed(m)
    x = torch.randn(m, k) * 2.0 ** torch.randint(-20, 20, (m, 1))
    x[torch.rand(m, k) < 0.05] = 0
    x[m // 2] = 0
    x[:, k // 2] = 0
    some = x.view(-1)[:: max(1, m * k // 40)]
    some.copy_(torch.tensor(SPECIAL * 10)[: len(some)])
    x = x.to(dtype)
    emulated = f"{format}[emulate]"
    on_cpu, on_gpu = (ops.quantize_input(x.to(d), emulated, True, True) for d in ("cpu", "cuda"))
    pitch, padded = -(-k // 16) * 16, -(-m // 128) * 128
    used = m * pitch + 4 * m, pitch * padded + 4 * pitch
    for cpu, gpu, size in zip(on_cpu, on_gpu, used):
        assert torch.equal(cpu[:size], gpu[:size].cpu())
    grad = torch.nan_to_num(x.float(), posinf=1.0, neginf=-1.0).clamp(-1e30, 1e30).to(dtype)
    grad = F.pad(grad, (0, -k % 16))
    weight = torch.diag(2.0 ** torch.randint(-9, 9, grad.shape[1:]))  # sums of one product: the codes
    made = []
    for device in ("cpu", "cuda"):
        q = ops.quantize(weight.to(device), emulated)
        none = torch.empty(0, device=device)
        made.append(ops.linear_backward(grad.to(device), q, none, False, True, False)[0])
    assert torch.equal(made[1].cpu(), made[0])


def test_shape_without_fp8_gemm_says_so():
    w = torch.nn.Parameter(ops.quantize(torch.randn(10, 64, device="cuda"), "float8_blockwise"))
    x = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)
    torch.testing.assert_close(F.linear(x, w), F.linear(x, ops.dequantize(w).bfloat16()))
    assert "out features is not a multiple of 16" in qshard.backend_report()


@pytest.mark.parametrize("format", [f for f in FORMATS if has_row_scales(f)])
def test_formats_of_blackwell_multiply_dequantized_weights(format):
    w = torch.nn.Parameter(ops.quantize(torch.randn(64, 80, device="cuda"), format))
    x = torch.randn(8, 80, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = F.linear(x, w)
    torch.testing.assert_close(y, F.linear(x, ops.dequantize(w).bfloat16()))
    grad = torch.randn_like(y)
    y.backward(grad)
    torch.testing.assert_close(x.grad, grad @ shown_to_dgrad(w.detach()).bfloat16())
    assert f"{format} forward: dequantized GEMM" in qshard.backend_report()
    assert "need compute capability 10.0 (Blackwell)" in qshard.backend_report()


@pytest.mark.parametrize("format", FP8_FORMATS)
def test_activation_saved_for_backward_is_fp8(format):
    """1 byte per element and 3 % of scales, instead of 2 bytes of bf16."""
    m, n, k = 4096, 1024, 2048
    w = torch.nn.Parameter(ops.quantize(torch.randn(n, k, device="cuda"), format))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        F.linear(torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True), w)
    activation = [t for t in saved if not are_codes_of(t, w)]
    assert [t.dtype for t in activation] == [torch.uint8]
    assert m * k <= activation[0].nbytes <= 1.04 * m * k


@pytest.mark.parametrize("format", FP8_FORMATS)
def test_linear_of_a_large_model_is_close_to_bf16(format):
    """Whatever algorithm timing chose. Rounding errors: 2.6 % of E4M3, 5.4 % of E5M2."""
    torch.manual_seed(0)
    w = torch.nn.Parameter(
        ops.quantize(torch.randn(14336, 4096, device="cuda", dtype=torch.bfloat16) / 64, format)
    )
    plain = torch.nn.Parameter(ops.dequantize(w.detach()))
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(4096, 14336, device="cuda", dtype=torch.bfloat16)
    results = []
    for weight in (w, plain):
        mine = x.detach().requires_grad_()
        y = F.linear(mine, weight)
        y.backward(grad)
        results.append((y, mine.grad, weight.grad))
    bounds = (0.04, 0.07, 0.075)
    for bound, actual, expected in zip(bounds, *results):
        assert relative_error(actual, expected) < bound


def three_linears(format):
    torch.manual_seed(0)
    weights = torch.randn(3, 64, 256, device="cuda")
    return [torch.nn.Parameter(ops.quantize(w, format)) for w in weights]


def quantize_launches(profile):
    """Launches of our kernels; Inductor names its own after the operators around them."""
    names = {e.key: e.count for e in profile.key_averages()}
    quantize = re.compile(r"\bqshard::.*\bquantize_")  # not requantize_if_changed
    return sum(n for name, n in names.items() if quantize.search(name))


@pytest.mark.parametrize("norm", [lambda x: F.rms_norm(x, (256,)), FusedNorm.apply])
@pytest.mark.parametrize("format", [f for f in FP8_FORMATS if f != "float8_delayed"])
def test_linears_of_one_activation_quantize_and_save_it_once(format, norm):
    """test_input_codes.py: which inputs may be shared."""
    weights = three_linears(format)
    x = norm(torch.randn(4, 48, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True))
    saved = []
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile,
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        outputs = [F.linear(x, w) for w in weights]
        torch.cuda.synchronize()
    codes = [t for t in saved if t.dtype == torch.uint8 and not are_codes_of(t, *weights)]
    assert len(codes) == 3 and len({t.data_ptr() for t in codes}) == 1
    assert quantize_launches(profile) == 1, profile.key_averages().table()
    sum(y.square().sum() for y in outputs).backward()

    again = [torch.nn.Parameter(w.detach()) for w in weights]
    parts = [x.detach().clone().requires_grad_() for _ in weights]  # an input for each
    others = [F.linear(part, w) for part, w in zip(parts, again)]
    sum(y.square().sum() for y in others).backward()
    for y, other, w, same in zip(outputs, others, weights, again):
        assert torch.equal(y, other) and torch.equal(w.grad, same.grad)

    del outputs, others, codes, saved
    held = torch.cuda.memory_allocated()
    del x, parts
    assert torch.cuda.memory_allocated() < held


class SharedInput(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 64, bias=False) for _ in range(3))

    def forward(self, x):
        x = torch.nn.functional.silu(x)
        return [layer(x) for layer in self.layers]


@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=lambda r: r.format)
def test_compiled_linears_of_one_input_quantize_and_save_it_once(recipe):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = qshard.quantize_(SharedInput().cuda(), recipe, keep_master=False)
    x = torch.randn(48, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    expected = model(x)
    sum(y.square().sum() for y in expected).backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True)
    compiled(x)
    saved = []
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile,
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        actual = compiled(x)
        torch.cuda.synchronize()
    quantizations = quantize_launches(profile)
    delayed = info_of(recipe.format).amax_history is not None  # a history, and so a scale, per weight
    assert quantizations == (3 if delayed else 1)
    assert sum(t.dtype == torch.uint8 for t in saved) == quantizations
    sum(y.square().sum() for y in actual).backward()
    for y, other in zip(actual, expected):
        torch.testing.assert_close(y, other, rtol=2e-2, atol=2e-2)
    for p, grad in zip(model.parameters(), grads):
        torch.testing.assert_close(p.grad, grad, rtol=5e-2, atol=5e-2)


def test_codes_of_an_input_belong_to_a_format():
    w = three_linears("float8_blockwise")[0]
    x = torch.randn(48, 256, device="cuda", dtype=torch.bfloat16)
    rows, columns = ops.quantize_input(x, "float8_blockwise", True, True)
    y, saved = ops.linear_forward(x, w, None, True)
    used = 256 * 128 + 4 * 2 * 4  # codes, and the scales of 2 x 1 blocks in rows of 4; the rest is padding
    assert torch.equal(columns[:used], saved[:used])
    for format in ("float8_blockwise", None):
        assert torch.equal(ops.linear_forward(x, w, None, False, False, rows, format)[0], y)
    with pytest.raises(RuntimeError, match="was quantized for a float8_tensorwise weight"):
        ops.linear_forward(x, w, None, False, False, rows, "float8_tensorwise")
    with pytest.raises(RuntimeError, match="input_rows must be quantize_input's"):
        ops.linear_forward(x, w, None, False, False, rows[:-1], "float8_blockwise")
    with pytest.raises(RuntimeError, match="a history of its own"):
        ops.quantize_input(x, "float8_delayed", True, False)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.format)
@pytest.mark.parametrize("fused", [False, True])
def test_training_step_never_synchronises(recipe, fused):
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3))).cuda()
    qshard.quantize_(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused, foreach=not fused)
    x = torch.randn(64, 256, device="cuda")

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=lambda r: r.format)
def test_training_follows_bf16(recipe):
    """Losses of a small regression stay near those of the plain model in bf16."""

    def train(quantize):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)]
        model = torch.nn.Sequential(*layers).cuda()
        if quantize:
            qshard.quantize_(model, recipe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
        target = torch.randn(256, 64, device="cuda") / 16
        for _ in range(100):
            x = torch.randn(512, 256, device="cuda")
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = (model(x).float() - x @ target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    plain, quantized_loss = train(False), train(True)
    assert quantized_loss < 1.3 * plain + 1e-2, (plain, quantized_loss)


@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=lambda r: r.format)
def test_compiled_block_on_cuda_equals_eager(recipe):
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 128))
    qshard.quantize_(block.cuda(), recipe)
    x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    expected = block(x)
    expected.float().sum().backward()
    grads = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    compiled = torch.compile(block, fullgraph=True)
    actual = compiled(x)
    actual.float().sum().backward()
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
    for grad, p in zip(grads, block.parameters()):
        torch.testing.assert_close(p.grad, grad, rtol=5e-2, atol=5e-2)
