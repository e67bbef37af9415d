"""The kernels of LayerNorm and RMSNorm: the values and gradients of their formulas in fp64, the same in every
run, for every layout and dtype, and what they leave to torch's operators."""

import itertools

import pytest
import torch

from qshard.nn.parts.norms import normalize

ops = torch.ops.qshard
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KINDS = ("RMSNorm", "LayerNorm")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Parts of a warp, a warp, several, idle lanes, four vectors a thread, heads of attention.
SIZES = [(3, 8), (1, 96), (33, 104), (4, 5, 128), (127, 1024), (4097, 4096), (5, 4104), (2, 8192)]


def exact(x, weight, bias, kind, eps, zero_centered):
    """In fp64."""
    x, gamma = x.double(), weight.double() + (1 if zero_centered else 0)
    if kind == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gamma
    return y if bias is None else y + bias.double()


def inputs(size, dtype, weight_dtype, kind, device="cuda"):
    generator = torch.Generator().manual_seed(sum(size))
    x = torch.randn(size, generator=generator) * torch.randn(*size[:-1], 1, generator=generator).exp() + 0.5
    weight = torch.rand(size[-1], generator=generator) + 0.5
    bias = torch.randn(size[-1], generator=generator) if kind == "LayerNorm" else None
    grad = torch.randn(size, generator=generator).to(device, dtype)
    leaves = (x.to(dtype), weight.to(weight_dtype), None if bias is None else bias.to(weight_dtype))
    leaves = [None if t is None else t.to(device).requires_grad_() for t in leaves]
    return leaves, grad


def results(function, leaves, grad, *args):
    y = function(*leaves, *args)
    return [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], grad.to(y.dtype))]


def check(got, wanted, dtypes):
    """Rounded once: within one ulp of the exact value, plus what fp32 sums are off by."""
    for mine, exact_value, dtype in zip(got, wanted, dtypes, strict=True):
        assert mine.dtype == dtype
        epsilon = torch.finfo(dtype).eps
        scale = exact_value.abs().max()
        torch.testing.assert_close(
            mine.double(), exact_value.double(), rtol=epsilon, atol=float(scale) * max(2e-6, epsilon / 64)
        )


def by_kernel(x, weight, bias, kind, eps, zero_centered):
    assert ops._can_normalize(x, weight, bias)
    return normalize(x, kind, weight, bias, eps, zero_centered)


@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_cuda(kind, dtype):
    for size, zero_centered in itertools.product(SIZES, (False, True)):
        for weight_dtype in {dtype, torch.float32}:
            leaves, grad = inputs(size, dtype, weight_dtype, kind)
            args = kind, 1e-5, zero_centered
            got = results(by_kernel, leaves, grad, *args)
            again = results(by_kernel, leaves, grad, *args)
            assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
            dtypes = [dtype, *(t.dtype for t in leaves if t is not None)]
            check(got, results(exact, leaves, grad, *args), dtypes)


@needs_gpu
def test_layouts_and_what_is_not_needed_cuda():
    (x, weight, _), grad = inputs((6, 4, 256), torch.bfloat16, torch.bfloat16, "RMSNorm")
    wanted = results(by_kernel, [x, weight, None], grad, "RMSNorm", 1e-5, False)
    for part in (
        x.detach().transpose(0, 1).contiguous().transpose(0, 1),
        torch.cat([x.detach()] * 2, -1)[..., 256:],
        torch.cat([x.detach().flatten()[:1], x.detach().flatten()])[1:].view(x.shape),
    ):
        leaves = [part.requires_grad_(), weight, None]
        got = results(by_kernel, leaves, grad.transpose(0, 1).contiguous().transpose(0, 1), "RMSNorm", 1e-5, False)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    y = normalize(x, "RMSNorm", weight.detach(), None, 1e-5, False)
    (only,) = torch.autograd.grad(y, x, grad)
    assert torch.equal(only, wanted[1])
    y = normalize(x.detach(), "RMSNorm", weight, None, 1e-5, False)
    assert torch.equal(torch.autograd.grad(y, weight, grad)[0], wanted[2])
    special = x.detach().clone()
    special[0, 0], special[1, 1, 7], special[2, 2, 9] = 0, float("inf"), float("nan")
    y = normalize(special, "RMSNorm", weight, None, 1e-5, False)
    expected = exact(special, weight, None, "RMSNorm", 1e-5, False)
    assert torch.equal(y.isnan(), expected.isnan()) and not y[0, 0].any()


@needs_gpu
def test_a_graph_of_the_gradients_cuda():
    for kind in KINDS:
        leaves, _ = inputs((3, 16), torch.float32, torch.float32, kind)
        given = [t for t in leaves if t is not None]

        def second(function):
            y = function(*leaves, kind, 1e-5, False)
            grads = torch.autograd.grad(y.sin().sum(), given, create_graph=True)
            return torch.autograd.grad(sum(g.square().sum() for g in grads), given)

        for mine, wanted in zip(second(by_kernel), second(exact), strict=True):
            torch.testing.assert_close(mine, wanted.float(), rtol=1e-4, atol=1e-5)


@needs_gpu
def test_what_keeps_memory_cuda():
    """No copies in fp32 are made of a weight in fp32 or of activations in bf16."""
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(4096, device="cuda", requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = normalize(x, "RMSNorm", weight, None, 1e-5, False)
    assert torch.cuda.memory_allocated() - before < 1.01 * x.nbytes
    y.backward(torch.ones_like(y))
    assert torch.cuda.max_memory_allocated() - before < 3.3 * x.nbytes  # y, its gradient, that of x


def test_left_to_torch():
    x, weight = torch.randn(2, 16), torch.ones(16)
    assert not ops._can_normalize(x, weight, None)
    with pytest.raises(RuntimeError, match="needs a CUDA input"):
        ops._normalize(x, weight, None, 1e-5, True, False)
    with pytest.raises(RuntimeError, match="needs a CUDA input"):
        ops._quantize_normalized(x, weight, None, 1e-5, True, False, "float8_blockwise", True, True)
    for device in ["cuda"] * torch.cuda.is_available():
        x, weight = x.to(device), weight.to(device)
        assert ops._can_normalize(x, weight, None)
        assert not ops._can_normalize(x[:, :15], weight[:15], None)
        assert not ops._can_normalize(x.double(), weight, None)
        assert not ops._can_normalize(x[:0], weight, None)
        assert not ops._can_normalize(x, weight[:8], None)
        wide = torch.randn(2, 20000, device=device)
        assert not ops._can_normalize(wide, wide[0], None)
        normalize(wide, "RMSNorm", wide[0].clone(), None, 1e-5, True)
