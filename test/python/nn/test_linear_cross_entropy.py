"""linear_cross_entropy is the linear and the loss one after the other, whose gradient passes as codes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from dist_helpers import device as rank_device
from dist_helpers import error_of, full_mesh, on_ranks
from helpers import FORMATS, ops
from nn_helpers import RECIPES, assert_bits, no_gpu, on_devices, relative_error
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import qshard
from qshard.formats import info_of
from qshard.nn import LinearCrossEntropyLoss, linear_cross_entropy

B16 = torch.bfloat16
IN_CODES = ("float8_tensorwise[emulate]", "float8_blockwise[emulate]")
in_codes = pytest.mark.parametrize("fmt", IN_CODES)
of_precisions = pytest.mark.parametrize("precision", [None, "bf16"])


def case(tokens=10, words=48, columns=32, dtype=torch.float32, seed=0, device="cpu"):
    """An input, a plain weight, targets of which some are ignored, and a bias."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (tokens, columns), (words, columns), (words,)
    x, weight, bias = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    target = torch.randint(words, (tokens,), generator=generator)
    target[1::4] = -100
    return x, weight / 4, target.to(device), bias


def step(function, *tensors, scale=1.0):
    """The loss of function(*tensors), and their gradients."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    loss = function(*leaves)
    (loss * scale).backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


def composed(target, **options):
    """In values: what torch computes of the same codes of weight and input."""

    def run(x, weight, bias=None):
        return F.cross_entropy(ops.linear(x, weight, bias).float(), target, **options)

    return run


# --------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("fmt", (*FORMATS, *IN_CODES))
@pytest.mark.parametrize("options", [{}, {"reduction": "sum", "label_smoothing": 0.1, "ignore_index": 3}], ids=str)
def test_is_the_linear_and_the_loss(fmt, options):
    x, weight, target, bias = case(words=64)
    if "ignore_index" in options:
        target = target.clamp(min=0)
    weight = ops.quantize(weight, fmt)

    def fused(x, weight, bias):
        return linear_cross_entropy(x, weight, target, linear_bias=bias, **options)

    got, expected = (step(f, x, weight, bias) for f in (fused, composed(target, **options)))
    torch.testing.assert_close(got[0], expected[0], rtol=1e-6, atol=1e-6)
    # E5M2 has two bits, blocks in E4M3 three; other gradients are quantized as ever, or not at all.
    bound = 0.12 if "emulate" in fmt else 0.03 if info_of(fmt).gemm.kind != "packed" else 1e-5
    for a, b in zip(got[1:], expected[1:]):
        assert a.dtype == b.dtype and relative_error(a, b) < bound


@in_codes
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_gradients_are_those_of_the_codes(fmt, scale):
    """The bits of linear_backward, which is told the scale of a mean and of the caller."""
    x, weight, target, bias = case(tokens=150, words=272)
    weight = ops.quantize(weight, fmt)
    got = step(
        lambda x, w, b: linear_cross_entropy(x, w, target, linear_bias=b), x, weight, bias, scale=scale
    )
    logits = ops.linear(x, weight, bias)
    losses, totals, rows, columns = ops.cross_entropy_and_gradient(
        logits, target, grad_format=fmt, rows=True, columns=True
    )
    factor = torch.tensor([scale]) / totals[1]
    arguments = {"grad_columns": columns, "grad_size": [150, 272], "value_dtype": torch.float32}
    expected = ops.linear_backward(rows, weight, x, False, True, True, grad_scale=factor, **arguments)
    assert_bits(got[0], totals[0] / totals[1])
    assert_bits(got[1:3], list(expected))
    ones = torch.ones(150, 272)
    values = ops.linear_backward(rows, ops.quantize(torch.eye(272), fmt), ones, False, True, False, **arguments)
    torch.testing.assert_close(got[3], values[0].sum(0) * factor, rtol=1e-5, atol=1e-6)


@in_codes
def test_a_scale_of_codes_is_a_factor_of_gradients(fmt):
    x, weight, target, _ = case(tokens=40, words=64)
    weight = ops.quantize(weight, fmt)
    *_, rows, columns = ops.cross_entropy_and_gradient(
        ops.linear(x, weight), target, grad_format=fmt, rows=True, columns=True
    )
    arguments = {"grad_columns": columns, "grad_size": [40, 64], "value_dtype": torch.float32}
    plain, scaled = (
        ops.linear_backward(rows, weight, x, False, True, True, grad_scale=scale, **arguments)
        for scale in (None, torch.tensor(0.25))
    )
    assert_bits(list(scaled), [0.25 * part for part in plain])
    with pytest.raises(ValueError, match="qshard::linear_backward: grad_scale is of a gradient in codes"):
        ops.linear_backward(torch.ones(40, 64), weight, x, False, True, True, grad_scale=torch.ones(1))
    with pytest.raises(RuntimeError, match="qshard::linear_backward: grad_scale must be plain float32 of one"):
        ops.linear_backward(rows, weight, x, False, True, True, grad_scale=torch.ones(2), **arguments)


@in_codes
@of_precisions
@pytest.mark.parametrize("dtype", [torch.float32, B16], ids=str)
def test_plain_weights_are_quantized_for_the_call(fmt, precision, dtype):
    x, weight, target, bias = case(dtype=dtype)

    def fused(x, weight, bias):
        return linear_cross_entropy(
            x, weight, target, linear_bias=bias, format=fmt, forward_precision=precision
        )

    got = step(fused, x, weight, bias)
    if precision is None:
        quantized = step(fused, x, ops.quantize(weight, fmt), bias)
        assert_bits(got, quantized)
    else:
        logits = F.linear(*(t.to(B16) for t in (x, weight, bias))).float()
        torch.testing.assert_close(got[0], F.cross_entropy(logits, target), rtol=1e-6, atol=1e-6)
    exact = step(lambda x, w, b: F.cross_entropy(F.linear(x, w, b).float(), target), x, weight, bias)
    for a, b in zip(got[1:], exact[1:]):
        assert a.dtype == b.dtype and relative_error(a, b) < 0.12


@in_codes
def test_bf16_forward_of_a_quantized_weight_multiplies_its_values(fmt):
    x, weight, target, _ = case()
    weight = ops.quantize(weight, fmt)
    got = linear_cross_entropy(x, weight, target, forward_precision="bf16")
    logits = F.linear(x.to(B16), ops.dequantize(weight, dtype=B16)).float()
    torch.testing.assert_close(got, F.cross_entropy(logits, target), rtol=1e-6, atol=1e-6)


@in_codes
@of_precisions
@pytest.mark.parametrize("trained", ["x", "weight", "bias", "x bias", "weight bias"])
def test_frozen_parts_get_no_gradients(fmt, precision, trained):
    names = ("x", "weight", "bias")
    x, weight, target, bias = case()
    tensors = dict(zip(names, (x, ops.quantize(weight, fmt), bias)))

    def run(trained):
        given = {n: t.detach().clone().requires_grad_(n in trained.split()) for n, t in tensors.items()}
        loss = linear_cross_entropy(
            given["x"], given["weight"], target, linear_bias=given["bias"], forward_precision=precision
        )
        loss.backward()
        return {name: tensor.grad for name, tensor in given.items()}

    everything = run("x weight bias")
    for name, grad in run(trained).items():
        if name in trained.split():
            assert_bits(grad, everything[name])
        else:
            assert grad is None


@in_codes
def test_keeps_codes_and_no_logits(fmt):
    x, weight, target, _ = case(tokens=128, words=256, dtype=B16)
    weight, kept = ops.quantize(weight, fmt).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = linear_cross_entropy(x.requires_grad_(), weight, target)
    large = [tensor for tensor in kept if tensor.numel() >= 128 * 256]
    assert [tensor.dtype for tensor in large] == [torch.uint8] * 2
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    assert_bits(torch.autograd.grad(loss * 1, (x, weight)), first)


@no_gpu
@pytest.mark.parametrize("fmt", ["float8_tensorwise", "float8_blockwise"])
@of_precisions
def test_gpus_multiply_the_codes_that_emulation_multiplies(fmt, precision):
    x, weight, target, bias = case(tokens=300, words=512, columns=256, dtype=B16, device="cuda")
    results = []
    for format in (fmt, f"{fmt}[emulate]"):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            def run(x, weight, bias):
                return linear_cross_entropy(
                    x, weight, target, linear_bias=bias, forward_precision=precision, label_smoothing=0.1
                )

            results.append(step(run, x, ops.quantize(weight, format), bias))
        assert sum(t.dtype == torch.uint8 and t.numel() >= 300 * 512 for t in kept) == 2
    for got, expected in zip(*results):
        assert relative_error(got, expected) < 1e-2


@no_gpu
def test_logits_are_freed_and_nothing_waits_for_the_device():
    x, weight, target, _ = case(tokens=1024, words=8192, columns=256, dtype=B16, device="cuda")
    weight = ops.quantize(weight, "float8_tensorwise").requires_grad_()
    x.requires_grad_()
    linear_cross_entropy(x, weight, target).backward()  # cuBLASLt times its candidates
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = linear_cross_entropy(x, weight, target)
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert kept < 1.3 * 2 * target.numel() * 8192  # codes in both orientations, and of the input


@in_codes
@pytest.mark.parametrize("tokens", [0, 1, 129])
def test_odd_numbers_of_tokens(fmt, tokens):
    x, weight, target, _ = case(tokens=tokens)
    weight = ops.quantize(weight, fmt)
    for reduction in ("mean", "sum"):
        got = step(lambda x, w: linear_cross_entropy(x, w, target, reduction=reduction), x, weight)
        expected = step(composed(target, reduction=reduction), x, weight)
        torch.testing.assert_close(got[0], expected[0], equal_nan=True, rtol=1e-6, atol=1e-6)
        for a, b in zip(got[1:], expected[1:]):
            assert relative_error(a, b) < 0.08 if tokens else not a.any()


@pytest.mark.parametrize("fmt", ("float8_tensorwise", *IN_CODES))
def test_ignored_tokens_alone_give_nan_and_zeros(fmt):
    x, weight, target, bias = case()
    ignored = torch.full_like(target, -100)
    loss, *grads = step(
        lambda x, w, b: linear_cross_entropy(x, w, ignored, linear_bias=b), x, ops.quantize(weight, fmt), bias
    )
    assert loss.isnan() and not any(grad.any() for grad in grads)


@in_codes
def test_a_nan_reaches_the_gradients(fmt):
    x, weight, target, _ = case()
    x[0, 0] = float("nan")
    loss, grad_x, grad_weight = step(
        lambda x, w: linear_cross_entropy(x, w, target), x, ops.quantize(weight, fmt)
    )
    assert loss.isnan() and grad_x[0].isnan().all() and grad_weight.isnan().any()


@in_codes
@of_precisions
def test_checkpointing_and_accumulation_change_no_bits(fmt, precision):
    x, weight, target, _ = case(tokens=40)
    weight = ops.quantize(weight, fmt)

    def run(x, weight):
        return linear_cross_entropy(x, weight, target, forward_precision=precision)

    expected = step(run, x, weight)
    assert_bits(step(lambda *args: checkpoint(run, *args, use_reentrant=False), x, weight), expected)
    leaf = weight.detach().clone().requires_grad_()
    for _ in range(2):
        run(x, leaf).backward()
    assert_bits(leaf.grad, 2 * expected[2])


@on_devices
@pytest.mark.parametrize("fmt", ("float8_tensorwise", "mxfp8", *IN_CODES))
@pytest.mark.parametrize("way", ["quantized", "plain", "plain, bf16"])
def test_the_compiled_module_is_the_eager_one(device, fmt, way):
    torch._dynamo.reset()
    words = 256 if device == "cuda" else 64
    x, weight, target, bias = case(tokens=64, words=words, columns=64, dtype=B16, device=device)
    options = {"format": fmt} if way != "quantized" else {}
    precision = "bf16" if "bf16" in way else None
    options |= {"device": device, "dtype": B16, "forward_precision": precision}
    model = LinearCrossEntropyLoss(64, words, bias=True, **options)
    with torch.no_grad():
        model.linear.weight.copy_(weight)
        model.linear.bias.copy_(bias)
    if way == "quantized":
        model.linear.weight = nn.Parameter(ops.quantize(weight, fmt))
        module_format(model, fmt)
    results = []
    for run in (model, torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")):
        leaf = x.detach().clone().requires_grad_()
        loss = run(leaf, target)
        loss.backward()
        results.append([loss.detach(), leaf.grad, *(p.grad for p in run.parameters())])
    assert_bits(*results)


def module_format(model, fmt):
    """As quantize_ leaves the linear, for formats of no recipe of the tests."""
    recipe = RECIPES[fmt.partition("[")[0]]
    if fmt.endswith("[emulate]"):
        recipe = type(recipe)(emulate=True)
    qshard.quantize_(model, recipe, filter_fn=lambda module, name: True)


@on_devices
@pytest.mark.parametrize("dtype", [B16, torch.float16], ids=str)
def test_autocast(device, dtype):
    x, weight, target, bias = case(tokens=32, words=64, device=device)
    weight = ops.quantize(weight, "float8_tensorwise")
    with torch.autocast(device, dtype):
        got = linear_cross_entropy(x, weight, target, linear_bias=bias)
    assert got.dtype == torch.float32
    assert_bits(got, linear_cross_entropy(x.to(dtype), weight, target, linear_bias=bias.to(dtype)))


def test_modules_of_every_recipe():
    for format, recipe in RECIPES.items():
        loss = LinearCrossEntropyLoss(32, 64, bias=True)
        plain = copy.deepcopy(loss)
        qshard.quantize_(loss, recipe, filter_fn=lambda *_: True)
        assert qshard.is_quantized(loss.linear.weight) and f"format={format}" in repr(loss)
        assert loss.state_dict().keys() - {"linear.weight_amax_history", "linear.weight_scaling_amax"} == {
            "linear.weight",
            "linear.bias",
        }
        x, _, target, _ = case()
        losses = [model(x, target.clamp(max=63)) for model in (loss, plain)]
        torch.testing.assert_close(*losses, rtol=0.05, atol=0)
        logits = F.linear(x, plain.linear.weight, plain.linear.bias)
        assert_bits(losses[1], F.cross_entropy(logits.float(), target))


def test_dynamic_weights_and_weight_only():
    x, _, target, _ = case()
    plain = LinearCrossEntropyLoss(32, 64)
    dynamic, weight_only = copy.deepcopy(plain), copy.deepcopy(plain)
    qshard.quantize_(dynamic, RECIPES["float8_tensorwise"], weights="dynamic", filter_fn=lambda *_: True)
    qshard.quantize_(weight_only, RECIPES["float8_tensorwise"], weight_only=True, filter_fn=lambda *_: True)
    quantized = ops.quantize(plain.linear.weight.detach(), "float8_tensorwise")
    assert_bits(dynamic(x, target), linear_cross_entropy(x, quantized, target))
    assert_bits(weight_only(x, target), F.cross_entropy(ops.linear(x, quantized, weight_only=True), target))
    dynamic(x, target).backward()
    assert dynamic.linear.weight.grad is not None


def test_tied_to_an_embedding():
    torch.manual_seed(0)
    embedding, loss = nn.Embedding(64, 32), LinearCrossEntropyLoss(32, 64)
    loss.linear.weight = embedding.weight
    model = nn.ModuleDict({"embedding": embedding, "loss": loss})
    qshard.quantize_(model, RECIPES["float8_blockwise"], filter_fn=lambda *_: True)
    assert loss.linear.weight is embedding.weight and qshard.is_quantized(embedding.weight)
    tokens = torch.randint(64, (12,))
    loss(embedding(tokens), tokens).backward()
    assert embedding.weight.grad.isfinite().all() and embedding.weight.grad.any()


def test_errors_say_the_way_out():
    x, weight, target, _ = case()
    quantized = ops.quantize(weight, "float8_tensorwise")
    name = "qshard::linear_cross_entropy"
    with pytest.raises(ValueError, match=f"{name}: reduction is 'mean' or 'sum', got 'none'"):
        linear_cross_entropy(x, quantized, target, reduction="none")
    with pytest.raises(ValueError, match=f"{name}: forward_precision is 'bf16' or None, got 'fp16'"):
        linear_cross_entropy(x, quantized, target, forward_precision="fp16")
    with pytest.raises(ValueError, match=f"{name}: the weight is plain; name the format"):
        linear_cross_entropy(x, weight, target)
    with pytest.raises(ValueError, match="unknown format"):
        linear_cross_entropy(x, weight, target, format="float9")
    with pytest.raises(RuntimeError, match=f"{name}: input .* do not go together"):
        linear_cross_entropy(x[:, :8], quantized, target)
    with pytest.raises(RuntimeError, match=f"{name}: target of shape"):
        linear_cross_entropy(x, quantized, target[:2])
    with pytest.raises(TypeError, match=f"{name}: target must be int64"):
        linear_cross_entropy(x, quantized, torch.rand(10, 48))
    with pytest.raises(RuntimeError, match=f"{name}: the weight is a view"):
        linear_cross_entropy(torch.randn(10, 48), quantized.t(), target)
    loss = linear_cross_entropy(x.requires_grad_(), quantized, target)
    with pytest.raises(RuntimeError, match=f"{name}: double backward"):
        torch.autograd.grad(loss * x.sum(), x, create_graph=True)


# ------------------------------------------------------------------------------ several ranks


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embedding, self.mixing = nn.Embedding(64, 32), nn.Linear(32, 32)
        self.loss = LinearCrossEntropyLoss(32, 64, **options)

    def forward(self, tokens, target):
        return self.loss(self.mixing(self.embedding(tokens)), target)


@pytest.mark.parametrize("way", ["quantized", "plain, bf16"])
@on_ranks(2, devices=("cpu",))
def test_under_fsdp2(way):
    """The same weights after three steps as on one device, and a head outside of its group is refused."""
    options = {"format": IN_CODES[0], "forward_precision": "bf16"} if way != "quantized" else {}
    torch.manual_seed(0)
    model = Model(**options).to(rank_device())
    if way == "quantized":
        qshard.quantize_(model, qshard.Float8CurrentScaling(emulate=True), filter_fn=lambda m, n: n == "loss.linear")
    alone = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(param_dtype=B16)
    for module in (model.loss, model):
        fully_shard(module, mesh=full_mesh(), mp_policy=policy)
    tokens = torch.randint(64, (8, 16)).to(rank_device())
    target = tokens.roll(-1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(tokens, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    with torch.no_grad():
        first = alone.to(B16)(tokens, target) if way != "quantized" else alone(tokens, target)
    torch.testing.assert_close(losses[0], first.item(), rtol=2e-2, atol=0)
    message = error_of(lambda: linear_cross_entropy(torch.ones(4, 32), model.loss.linear.weight, target[0, :4]))
    assert "qshard.nn.linear_cross_entropy: a DTensor of shape (64, 32)" in message
