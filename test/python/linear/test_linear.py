"""Linear with a quantized weight, forward and backward, eager."""

import pytest
import torch
import torch.nn.functional as F
from helpers import fit, shown_to_dgrad

import qshard

RECIPES = (
    qshard.Float8CurrentScaling(),
    qshard.Float8RowwiseScaling(),
    qshard.Float8BlockScaling(),
    qshard.DelayedScaling(),
    qshard.MXFP8BlockScaling(),
    qshard.MXFP8BlockScaling(weight_block=(1, 32)),
    qshard.NVFP4BlockScaling(),
    qshard.NVFP4BlockScaling(disable_2d_quantization=True),
)
FORMATS = [recipe.format for recipe in RECIPES]
ops = torch.ops.qshard


OUT = 64


def pair(format, rows=OUT, cols=40, dtype=torch.float32, keep_master=False):
    """A quantized parameter and a plain one holding the values its codes stand for."""
    weight = torch.randn(rows, cols, dtype=dtype)
    q = ops.quantize(weight, format, keep_master=keep_master)
    return torch.nn.Parameter(q), torch.nn.Parameter(ops.dequantize(q))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(40,), (7, 40), (2, 3, 40), (0, 40), (2, 0, 40)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_plain_linear_on_dequantized_weight(format, shape, with_bias):
    q, plain = pair(format)
    bias = torch.randn(OUT, requires_grad=True) if with_bias else None
    plain_bias = bias.detach().clone().requires_grad_() if with_bias else None
    x = torch.randn(shape, requires_grad=True)
    plain_x = x.detach().clone().requires_grad_()

    y, expected = F.linear(x, q, bias), F.linear(plain_x, plain, plain_bias)
    torch.testing.assert_close(y, expected)
    assert y._base is None  # FSDP2 warns about modules that return views
    grad = torch.randn_like(expected)
    y.backward(grad)
    expected.backward(grad)
    dgrad = grad @ shown_to_dgrad(q.detach())
    torch.testing.assert_close(x.grad, dgrad)
    torch.testing.assert_close(q.grad, plain.grad)
    if with_bias:
        torch.testing.assert_close(bias.grad, plain_bias.grad)
    assert not qshard.is_quantized(q.grad)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows,cols", [(1, 1), (3, 5), (128, 128), (129, 257), (0, 8), (8, 0)])
def test_ragged_weights_multiply_as_their_values(format, rows, cols):
    rows = fit(format, rows)
    q, plain = pair(format, rows, cols)
    x = torch.randn(6, cols, requires_grad=True)
    y = F.linear(x, q)
    torch.testing.assert_close(y, F.linear(x, plain))
    y.sum().backward()
    assert q.grad.shape == (rows, cols) and x.grad.shape == (6, cols)


@pytest.mark.parametrize("format", FORMATS)
def test_master_is_the_value_and_codes_are_what_linear_multiplies(format):
    q, plain = pair(format, keep_master=True)
    x = torch.randn(5, 40)
    torch.testing.assert_close(F.linear(x, q), F.linear(x, plain))
    torch.testing.assert_close(torch.mm(x, q.t()), torch.mm(x, plain.t()))
    y = x @ plain.detach().t()
    torch.testing.assert_close(torch.mm(y, q.detach()), y @ shown_to_dgrad(q.detach()))
    assert torch.equal(q + 0, ops.master(q))
    assert not torch.equal(q + 0, plain + 0)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_computes_in_the_activation_dtype(format, dtype):
    """fp32 masters with low-precision activations, without autocast or FSDP2."""
    q, plain = pair(format, keep_master=True)
    x = torch.randn(5, 40, dtype=dtype, requires_grad=True)
    y = F.linear(x, q)
    assert y.dtype == dtype
    torch.testing.assert_close(y, F.linear(x, plain.to(dtype)))
    y.sum().backward()
    assert x.grad.dtype == dtype and q.grad.dtype == torch.float32
    with torch.inference_mode():
        assert torch.equal(F.linear(x, q), y)


def test_autocast_gives_bf16_outputs_and_fp32_gradients():
    q, plain = pair("float8_blockwise", keep_master=True)
    x = torch.randn(5, 40, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = F.linear(x, q)
        expected = F.linear(x, plain)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    y.float().sum().backward()
    assert q.grad.dtype == torch.float32 and q.grad.shape == q.shape


def test_module_under_autocast():
    module = qshard.quantize_(torch.nn.Sequential(torch.nn.Linear(16, 16)), RECIPES[1])[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(torch.randn(3, 16)).dtype == torch.bfloat16


def test_saved_weight_is_guarded_by_its_version():
    q, _ = pair("float8_blockwise")
    x = torch.randn(5, 40, requires_grad=True)
    y = F.linear(x, q)
    with torch.no_grad():
        q.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_double_backward_is_refused():
    q, _ = pair("float8_blockwise")
    x = torch.randn(5, 40, requires_grad=True)
    y = F.linear(x, q)
    (gx,) = torch.autograd.grad(y.square().sum(), x, create_graph=False)
    assert gx.shape == x.shape
    y = F.linear(x, q)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_gradients(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    q, plain = pair("float8_tensorwise")
    x = torch.randn(5, 40, requires_grad=True)
    y = checkpoint(lambda t: F.gelu(F.linear(t, q)), x, use_reentrant=use_reentrant)
    y.sum().backward()
    plain_x = x.detach().clone().requires_grad_()
    F.gelu(F.linear(plain_x, plain)).sum().backward()
    torch.testing.assert_close(x.grad, plain_x.grad)
    torch.testing.assert_close(q.grad, plain.grad)


def test_row_windows_multiply():
    q, plain = pair("float8_blockwise", 300, 64)
    x = torch.randn(4, 64)
    with torch.no_grad():
        torch.testing.assert_close(F.linear(x, q[3:200]), F.linear(x, plain[3:200]))
        torch.testing.assert_close(F.linear(x, q[:, :32].contiguous()[:, :32].new_zeros(2, 64)),
                                   torch.zeros(4, 2))


def test_grad_enabled_only_where_needed():
    q, _ = pair("float8_blockwise")
    q.requires_grad_(False)
    x = torch.randn(5, 40, requires_grad=True)
    F.linear(x, q).sum().backward()
    assert q.grad is None and x.grad is not None


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.format)
def test_flop_counter_sees_the_linear(recipe):
    from torch.utils.flop_counter import FlopCounterMode

    module = qshard.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False)), recipe)
    x = torch.randn(8, 64, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        module(x).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 8 * 64 * 32


def test_backend_report_names_the_reason():
    q, _ = pair("float8_blockwise")
    F.linear(torch.randn(2, 40), q)
    lines = qshard.backend_report().splitlines()
    assert any("float8_blockwise forward" in line and "CPU" in line for line in lines)


def test_backend_report_counts_products_of_stacks():
    """torch's bmm multiplies dequantized codes, of all matrices; _grouped_mm those of linears."""
    stack = ops.quantize(torch.randn(4, 64, 48), "float8_blockwise")
    x, offs = torch.randn(8, 48, dtype=torch.bfloat16), torch.tensor([2, 4, 4, 8]).int()

    def counts():
        start = "float8_blockwise aten::"
        lines = [l for l in qshard.backend_report().splitlines() if l.startswith(start)]
        words = [line.removeprefix(start).split() for line in lines]
        return {name: int(count) for name, _, _, count, _ in words}

    before = counts()
    torch.bmm(torch.randn(4, 2, 48), stack.transpose(1, 2))
    F.grouped_mm(x, stack.bfloat16().transpose(1, 2), offs=offs)
    after = counts()
    assert after["bmm:"] == before.get("bmm:", 0) + 1, (before, after)
    assert "_grouped_mm:" not in after


@pytest.mark.parametrize("recipe", RECIPES, ids=FORMATS)
def test_weight_only_linears_multiply_dequantized_weights(recipe):
    """The plain arithmetic on dequantized weights, activations saved as they are."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.Linear(64, 32))
    qshard.quantize_(model, recipe, weight_only=True)
    x = torch.randn(7, 40, requires_grad=True)
    weights = [torch.nn.Parameter(ops.dequantize(m.weight.detach())) for m in model]
    plain_x = x.detach().clone().requires_grad_()
    plain = F.linear(F.linear(plain_x, weights[0], model[0].bias), weights[1], model[1].bias)
    y = model(x)
    assert torch.equal(y, plain)
    y.sum().backward()
    grads = [torch.ones_like(y)]
    for module in reversed(model):
        grads.append(grads[-1] @ shown_to_dgrad(module.weight.detach()))
    assert torch.equal(x.grad, grads[2])
    inputs = (x.detach(), F.linear(x.detach(), weights[0], model[0].bias).detach())
    for module, grad, layer_input in zip(model, grads[1::-1], inputs):
        torch.testing.assert_close(module.weight.grad, grad.t() @ layer_input)
    assert f"{recipe.format} forward: dequantized GEMM" in qshard.backend_report()
    assert "weight-only, as asked for" in qshard.backend_report()


def test_weight_only_needs_linear_itself():
    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Scaled(8, 8))
    with pytest.raises(TypeError, match="cannot change how 1, a Scaled"):
        qshard.quantize_(model, RECIPES[0], weight_only=True)
    assert not any(qshard.is_quantized(p) for p in model.parameters())
