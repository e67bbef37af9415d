"""norm_linear is a normalization and its linears: the same bits of outputs and all gradients, where codes are
made of what is never stored, too. It keeps the input alone."""

import pytest
import torch
from helpers import FORMATS, are_codes_of, ops, shares_input_codes
from nn_helpers import RECIPES, assert_bits, gradients, no_gpu, on_devices, randomize
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import qshard
from qshard import module_state, nn
from qshard._runtime.classes import Process
from qshard.nn.parts.multiply import joined
from qshard.nn.parts.norms import normalize

B16, F32 = torch.bfloat16, torch.float32
NORMS = ("LayerNorm", "RMSNorm")
IN_CODES = {
    "tensorwise": qshard.Float8CurrentScaling(),
    "rowwise": qshard.Float8RowwiseScaling(),
    "blockwise": qshard.Float8BlockScaling(),
    "blockwise, 1x128": qshard.Float8BlockScaling(x_block_scaling_dim=1),
}
PARTS = {"q_": 256, "k_": 128, "v_": 128}
every_recipe = pytest.mark.parametrize("recipe", IN_CODES)


def draw(*shape, seed, device="cpu", dtype=F32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 2 + 0.25).to(device, dtype)


def make(recipe, kind="RMSNorm", columns=512, rows=512, parts=None, bias=False, dtype=B16, device="cuda", **kwargs):
    module = nn.LayerNormLinear(columns, rows, normalization=kind, bias=bias, parameters_split=parts,
                                params_dtype=dtype, device=device, **kwargs)
    return qshard.quantize_(randomize(module), recipe, filter_fn=lambda *_: True)


def composed(module, x):
    """As the module, by one operator after the other."""
    gamma, beta = module.layer_norm_weight, module.layer_norm_bias
    normed = normalize(x, module.normalization, gamma, beta, module.eps, module.zero_centered_gamma)
    pairs = zip(module.weight_names, module.bias_names)
    return joined([ops.linear(normed, *(getattr(module, name) for name in pair)) for pair in pairs])


def step(function, module, x, times=1, needs_x=True):
    """Output, and gradients of x and of the module, after so many backwards."""
    x = x.detach().requires_grad_(needs_x)
    for parameter in module.parameters():
        parameter.grad = None
    for i in range(times):
        y = function(module, x)
        y.backward(draw(*y.shape, seed=90 + i, device=y.device, dtype=y.dtype))
    grads = {name: grad for name, grad in gradients(module).items() if grad is not None}
    return [y.detach(), *([x.grad] if needs_x else []), grads]


def fused(module, x):
    return module(x)


def operators(function, *args):
    """Names of qshard's operators that function(*args) ran, and its result."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        result = function(*args)
    keys = {event.key for event in profiler.key_averages()}
    return {key.removeprefix("qshard::") for key in keys if key.startswith("qshard::")}, result


def check(module, x, in_codes, **kwargs):
    """Bits of the composition, by the operator where x is on a device that has it."""
    ran, got = operators(lambda: step(fused, module, x, **kwargs))
    assert ("_norm_linear_forward" in ran) == (in_codes and has_fp8(x.device))
    assert_bits(got, step(composed, module, x, **kwargs))


def has_fp8(device):
    return device.type == "cuda" and not Process.why_dequantized(device)["float8_blockwise"]


# ---------------------------------------------------------------------------------- the module


@on_devices
@pytest.mark.pairwise
@every_recipe
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("parts", [None, PARTS], ids=["one", "three"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype, params", [(B16, B16), (F32, F32), (B16, F32), (torch.float16, F32)], ids=str)
@pytest.mark.parametrize("shape", [(128,), (2, 3, 21), (1,)], ids=str)
def test_is_the_composition(device, recipe, kind, parts, bias, dtype, params, shape):
    module = make(IN_CODES[recipe], kind, parts=parts, bias=bias, dtype=params, device=device,
                  zero_centered_gamma=bias)
    x = draw(*shape, 512, seed=1, device=device, dtype=dtype)
    for times in (1, 3):  # from the second on they add to .grad within the GEMM
        check(module, x, in_codes=True, times=times)


@on_devices
@pytest.mark.parametrize("format", [name for name in FORMATS if name != "float8_delayed"])  # each call is another
@pytest.mark.parametrize("dtype", [B16, F32], ids=str)
def test_gradients_of_one_input_are_added_where_they_are_made(device, format, dtype):
    """In place: the bits of a sum of two, of the weight's gradient too."""
    w = ops.quantize(draw(64, 128, seed=1), format).to(device)
    grad, x, before = (draw(2, 24, n, seed=i, device=device, dtype=dtype) for i, n in enumerate((64, 128, 128)))
    of_input, of_weight = ops.linear_backward(grad, w, x, False, True, True)
    expected, total = before + of_input, torch.zeros_like(of_weight)
    for needs_weight, weight_grad in ((True, None), (False, None), (True, total)):
        into = before.clone()
        none, made = ops.linear_backward(
            grad, w, x, False, True, needs_weight, input_sum=into, weight_grad=weight_grad
        )
        assert none.numel() == 0
        assert_bits(into, expected)
        assert into._version == 1
        if needs_weight and weight_grad is None:
            assert_bits(made, of_weight)
        else:
            assert made.numel() == 0
    assert_bits(total, of_weight)
    for wrong in (before[..., :127], before.transpose(0, 1), before.flatten()):
        with pytest.raises(RuntimeError, match="linear_backward: needs a plain contiguous input_sum"):
            ops.linear_backward(grad, w, x, False, True, True, input_sum=wrong)


@on_devices
@every_recipe
def test_strided_and_special_inputs(device, recipe):
    module = make(IN_CODES[recipe], "LayerNorm", parts=PARTS, bias=True, device=device)
    x = draw(6, 40, 512, seed=1, device=device, dtype=B16)
    check(module, x.transpose(0, 1), in_codes=True)
    check(module, torch.cat([x, x], -1)[..., 512:], in_codes=True)
    x[0, 0] = 0
    check(module, x, in_codes=True)


@on_devices
@every_recipe
def test_what_needs_no_gradient(device, recipe):
    module = make(IN_CODES[recipe], "LayerNorm", parts=PARTS, bias=True, device=device)
    x = draw(24, 512, seed=1, device=device, dtype=B16)
    check(module, x, in_codes=True, needs_x=False, times=2)
    names = [name for name, _ in module.named_parameters()]
    for frozen in (["k_weight", "q_bias"], ["layer_norm_weight", "layer_norm_bias"],
                   ["q_weight", "k_weight", "v_weight", "layer_norm_bias"], names):
        for name in names:
            module.get_parameter(name).requires_grad_(name not in frozen)
        check(module, x, in_codes=True, times=2)
    for name in names:
        module.get_parameter(name).requires_grad_(True)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert_bits(module(x), composed(module, x))


@on_devices
@every_recipe
def test_parts_used_by_themselves(device, recipe):
    """Parts without a gradient leave their weights without one; torch.autograd.grad adds to nothing."""
    module = make(IN_CODES[recipe], parts=PARTS, bias=True, device=device)
    x = draw(24, 512, seed=1, device=device, dtype=B16)

    def parts_of(module, x, by_module):
        if by_module:
            return module(x, as_parts=True)
        return composed(module, x).split(list(PARTS.values()), -1)

    for used in ((0, 1, 2), (0, 2), (1,)):
        results = []
        for by_module in (True, False):
            given = x.clone().requires_grad_()
            outputs = parts_of(module, given, by_module)
            grads = [draw(*outputs[i].shape, seed=i, device=device, dtype=B16) for i in used]
            wanted = [given, module.layer_norm_weight]
            wanted += [module.get_parameter(f"{'qkv'[i]}_{kind}") for i in used for kind in ("weight", "bias")]
            results.append(torch.autograd.grad([outputs[i] for i in used], wanted, grads))
        if len(used) < 3:  # split gives the others zeros, which are added
            results = [result[2:] for result in results]
        assert_bits(*results)
    outputs = module(x, as_parts=True)
    outputs[1].sum().backward()
    assert module.k_weight.grad is not None and module.q_weight.grad is None


@on_devices
@every_recipe
def test_recomputed_and_under_autocast(device, recipe):
    module = make(IN_CODES[recipe], parts=PARTS, dtype=F32, device=device)
    x = draw(24, 512, seed=1, device=device)

    def again(module, x):
        return checkpoint(fused, module, x, use_reentrant=False)

    assert_bits(step(again, module, x, times=2), step(composed, module, x, times=2))
    with torch.autocast(device, dtype=B16):
        y = module(x)
        expected = composed(module, x)
    assert y.dtype == B16
    assert_bits(y, expected)


@no_gpu
@pytest.mark.parametrize("case", ["rows", "columns", "wide", "main_grad", "normed", "weight_only", "plain"])
def test_left_to_the_composition_cuda(case):
    sizes = {"rows": {"rows": 504}, "columns": {"columns": 500}, "wide": {"columns": 20480}}.get(case, {})
    options = {"main_grad": {"fuse_wgrad_accumulation": True}, "normed": {"return_layernorm_output": True}}
    module = make(IN_CODES["tensorwise"], **sizes, **options.get(case, {}))
    if case == "weight_only":
        module_state.of(module).weight_only = True
    if case == "plain":
        module = nn.LayerNormLinear(512, 512, params_dtype=B16, device="cuda")
    if case == "main_grad":
        module.weight.main_grad = torch.zeros(module.weight.shape, device="cuda")
    x = draw(96, module.in_features, seed=1, device="cuda", dtype=B16).requires_grad_()
    ran, outputs = operators(module, x)
    assert "_norm_linear_forward" not in ran
    y = outputs[0] if isinstance(outputs, tuple) else outputs
    y.sum().backward()
    if case in ("rows", "columns", "wide"):
        check(module, x, in_codes=False, times=2)


@no_gpu
@pytest.mark.parametrize("format", FORMATS)
def test_other_formats_cuda(format):
    module = make(RECIPES[format], "LayerNorm", parts=PARTS, bias=True)
    x = draw(96, 512, seed=1, device="cuda", dtype=B16)
    ran, _ = operators(step, fused, module, x)
    assert ("_norm_linear_forward" in ran) == (shares_input_codes(format) and has_fp8(x.device))


# -------------------------------------------------------------------------------- what it keeps


@no_gpu
@every_recipe
@pytest.mark.parametrize("kind", NORMS)
def test_keeps_the_input_alone_cuda(recipe, kind):
    module = make(IN_CODES[recipe], kind, columns=1024, rows=512, parts=PARTS)
    x = draw(2048, 1024, seed=1, device="cuda", dtype=B16).requires_grad_()
    if not has_fp8(x.device):
        pytest.skip("needs a GPU with FP8 GEMMs")
    module(x).sum().backward()  # workspaces
    parameters = {parameter.data_ptr() for parameter in module.parameters() if not qshard.is_quantized(parameter)}
    kept = {}

    def pack(tensor):
        if not are_codes_of(tensor, *module.parameters()) and tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = module(x, as_parts=True)
    added = torch.cuda.memory_allocated() - before - sum(y.nbytes for y in outputs)
    statistics = (2 if kind == "LayerNorm" else 1) * 4 * 2048
    amax = 4 if recipe == "tensorwise" else 0
    assert kept.pop(x.data_ptr()) == x.nbytes
    assert sum(kept.values()) == statistics + amax
    assert added <= statistics + 4096
    sum(y.sum() for y in outputs).backward()


# --------------------------------------------------------------------------------- the operator


@pytest.mark.pairwise
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype, params", [(F32, F32), (B16, B16), (B16, F32)], ids=str)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_operator_on_cpu(fmt, dtype, params, kind, zero_centered):
    gamma = draw(32, seed=1, dtype=params).requires_grad_()
    beta = draw(32, seed=2, dtype=params).requires_grad_() if kind == "LayerNorm" else None
    weights = [ops.quantize(draw(rows, 32, seed=rows), fmt).requires_grad_() for rows in (64, 32)]
    biases = [draw(rows, seed=rows, dtype=dtype).requires_grad_() for rows in (64, 32)]
    leaves = [gamma, *([] if beta is None else [beta]), *weights, *biases]

    def by_operator(x):
        return ops.norm_linear(x, gamma, beta, weights, biases, eps=1e-3, rms=beta is None,
                               zero_centered_gamma=zero_centered, format=fmt)

    def by_linears(x):
        normed = normalize(x, kind, gamma, beta, 1e-3, zero_centered)
        return [ops.linear(normed, w, b) for w, b in zip(weights, biases)]

    results = []
    for function in (by_operator, by_linears):
        x = draw(2, 5, 32, seed=7, dtype=dtype).requires_grad_()
        outputs = function(x)
        grads = [draw(*y.shape, seed=9, dtype=dtype) for y in outputs]
        results.append([list(outputs), list(torch.autograd.grad(outputs, [x, *leaves], grads))])
        with torch.inference_mode():
            results[-1].append(list(function(x.detach())))
    assert_bits(*results)


@on_devices
def test_wrong_uses_of_norm_linear_are_refused(device):
    x, gamma = draw(32, 128, seed=1, device=device).requires_grad_(), torch.ones(128, device=device)
    weights = [ops.quantize(draw(64, 128, seed=2, device=device), "float8_tensorwise").requires_grad_()] * 2
    call = {"eps": 1e-5, "rms": True}
    for wrong in ((x[:, :64], gamma, None, weights), (x, gamma, gamma, weights), (x, gamma[:64], None, weights),
                  (x, gamma, None, []), (x, gamma, None, weights, [torch.ones(64, device=device)])):
        with pytest.raises(RuntimeError, match=r"norm_linear: .* do not go together"):
            ops.norm_linear(*wrong, **call)
    with pytest.raises(RuntimeError, match="is not quantized|not a quantized|needs a quantized"):
        ops.norm_linear(x, gamma, None, [draw(64, 128, seed=2, device=device)], **call)
    first, second = ops.norm_linear(x, gamma, None, weights, **call)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad((first.square() + second).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="norm_linear_forward: needs a CUDA input"):
        ops._norm_linear_forward(x.cpu(), gamma.cpu(), None, [w.detach().cpu() for w in weights], None, 1e-5,
                                 True, False, "float8_tensorwise")
