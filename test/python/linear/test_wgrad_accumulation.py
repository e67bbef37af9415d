"""Backwards that add to a weight's .grad: what they leave there, and who would notice."""

import threading

import pytest
import torch
import torch.nn.functional as F
from dist_helpers import on_worlds
from helpers import FORMATS
from models.fsdp2 import build
from models.training import batch, loss_of
from models.weights import quantized_parameters
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import qshard

ops = torch.ops.qshard
ROWS, COLS, TOKENS = 64, 48, 8


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.manual_seed(0)
    return torch.device(request.param)


def parameter(device, format="float8_blockwise", rows=ROWS, cols=COLS, dtype=torch.float32):
    values = torch.randn(rows, cols, device=device, dtype=dtype)
    return torch.nn.Parameter(ops.quantize(values, format, keep_master=True))


def batches(q, count, dtype=torch.float32, tokens=TOKENS):
    """Inputs and gradients of outputs."""
    rows, cols = q.shape
    return [
        (
            torch.randn(tokens, cols, device=q.device, dtype=dtype, requires_grad=True),
            torch.randn(tokens, rows, device=q.device, dtype=dtype),
        )
        for _ in range(count)
    ]


def place_of_weight_grad(name):
    """Where the gradient that is added to stands among an operator's arguments."""
    return [argument.name for argument in getattr(ops, name).default._schema.arguments].index("weight_grad")


def added(function):
    """How many gradients function() added to a .grad by itself."""
    settings = {"acc_events": True, "record_shapes": True}
    with profile(activities=[ProfilerActivity.CPU], **settings) as profiler:
        function()
    events = profiler.key_averages(group_by_input_shape=True)
    places = {f"qshard::{name}": place_of_weight_grad(name) for name in ("linear_backward", "swiglu_linear_backward")}
    return sum(e.count for e in events if e.key in places and e.input_shapes[places[e.key]])


def backward(q, x, gradient, **kwargs):
    F.linear(x, q).backward(gradient, **kwargs)


def gradient_of(q, x, gradient):
    """As autograd is handed it: what is added to nothing."""
    return torch.autograd.grad(F.linear(x, q), q, gradient)[0]


def assert_sum(actual, parts):
    """The sum of the parts but for how often, and when, it was rounded."""
    epsilon = torch.finfo(actual.dtype).eps
    exact = sum(part.double() for part in parts)
    size = sum(part.double().abs() for part in parts)
    error = (actual.double() - exact).abs()
    # Parts are rounded themselves, and an fp32 sum over tokens has no fixed order.
    assert (error <= 2 * len(parts) * epsilon * size + 1e-5 * size.max()).all(), error.max()


@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", FORMATS)
def test_sum_in_place(device, format, dtype, passes):
    q = parameter(device, format, dtype=dtype)
    samples = batches(q, passes, dtype)
    parts = [gradient_of(q, *sample) for sample in samples]
    backward(q, *samples[0])
    first, pointer, expected = q.grad, q.grad.data_ptr(), q.grad.clone()
    for (x, gradient), part in zip(samples[1:], parts[1:]):
        version = q.grad._version
        assert added(lambda: backward(q, x, gradient)) == 1
        assert q.grad is first and q.grad.data_ptr() == pointer
        assert q.grad._version == version + 1
        if device.type == "cpu":  # autograd's own bits
            assert torch.equal(q.grad, expected := expected + part)
    assert_sum(q.grad, parts)


@pytest.mark.parametrize("cols", [16, 40, 256])
@pytest.mark.parametrize("rows", [16, 20, 256])
def test_weights_of_any_size_accumulate(device, rows, cols):
    """On CUDA, padded operands and dequantized ones too."""
    q = parameter(device, rows=rows, cols=cols)
    samples = batches(q, 2, torch.bfloat16, tokens=40)
    parts = [gradient_of(q, *sample) for sample in samples]
    for sample in samples:
        backward(q, *sample)
    assert_sum(q.grad, parts)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_bits_of_autograd_with_any_number_of_threads(threads):
    q = parameter(torch.device("cpu"), rows=129, cols=100)
    plain = torch.nn.Parameter(torch.zeros(129, 100))
    samples = batches(q, 3, tokens=16)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for x, gradient in samples:
            backward(q, x, gradient)
            F.linear(x, plain).backward(gradient)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(q.grad, plain.grad)


def test_no_tokens_add_nothing(device):
    q = parameter(device)
    backward(q, *batches(q, 1)[0])
    before = q.grad.clone()
    assert added(lambda: backward(q, *batches(q, 1, tokens=0)[0])) == 1
    assert torch.equal(q.grad, before)


@pytest.mark.parametrize("tokens", [(), (2, 3)])
def test_inputs_of_any_dimensions(device, tokens):
    q = parameter(device)
    x = torch.randn(*tokens, COLS, device=device, requires_grad=True)
    gradient = torch.randn(*tokens, ROWS, device=device)
    part = gradient_of(q, x, gradient)
    for _ in range(2):
        backward(q, x, gradient)
    assert_sum(q.grad, [part, part])
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("sum_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_of_another_dtype(device, dtype, sum_dtype):
    q = parameter(device, dtype=dtype)
    q.grad_dtype = sum_dtype
    q.grad = torch.ones(q.shape, device=device, dtype=sum_dtype)
    samples = batches(q, 2, torch.bfloat16)
    parts = [gradient_of(q, *sample) for sample in samples]
    assert added(lambda: [backward(q, *sample) for sample in samples]) == 2
    assert q.grad.dtype == sum_dtype
    assert_sum(q.grad, [torch.ones_like(q.grad), *parts])


def test_first_gradient_is_rounded_to_its_own_dtype_only(device):
    """bf16 weights and activations, fp32 gradients: the GEMM writes fp32 where it can (CUDA)."""
    q = parameter(device, dtype=torch.bfloat16)
    x, gradient = batches(q, 1, torch.bfloat16)[0]
    exact = ops.linear_backward(gradient, q, x, False, False, True, grad_dtype=torch.float32)[1]
    q.grad_dtype = torch.float32
    backward(q, x, gradient)
    assert q.grad.dtype == exact.dtype == torch.float32
    assert torch.equal(q.grad, exact)
    assert device.type == "cpu" or not torch.equal(exact, exact.bfloat16().float())
    q.grad, q.grad_dtype = None, None  # any: the one it is made in
    backward(q, x, gradient)
    assert q.grad.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="grad_dtype Double is not supported"):
        ops.linear_backward(gradient, q, x, False, False, True, grad_dtype=torch.float64)


def test_a_tied_weight_accumulates_both_gradients(device):
    q = parameter(device, rows=48)
    x, gradient = batches(q, 1)[0]
    y = F.linear(F.linear(x, q), q)
    (part,) = torch.autograd.grad(y, q, gradient)
    assert added(lambda: F.linear(F.linear(x, q), q).backward(gradient)) == 0
    assert added(lambda: F.linear(F.linear(x, q), q).backward(gradient)) == 2
    assert_sum(q.grad, [part, part])


def test_weight_used_otherwise_too(device):
    q = parameter(device)
    x, gradient = batches(q, 1)[0]
    q.grad = torch.zeros(q.shape, device=device)

    def both():
        return (F.linear(x, q) * gradient).sum() + ops.dequantize(q).sum()

    (part,) = torch.autograd.grad(both(), q)
    assert added(lambda: both().backward()) == 1
    assert_sum(q.grad, [part])


# ------------------------------------------------------------------ gradients asked for otherwise


def test_autograd_grad_leaves_grad_alone(device):
    q = parameter(device)
    q.grad = torch.ones(q.shape, device=device)
    x, gradient = batches(q, 1)[0]
    expected = gradient.t() @ x
    assert added(lambda: gradient_of(q, x, gradient)) == 0
    assert torch.equal(q.grad, torch.ones_like(q.grad))
    if device.type == "cpu":
        assert torch.equal(gradient_of(q, x, gradient), expected)


def test_backward_of_chosen_inputs(device):
    q = parameter(device)
    q.grad = torch.ones(q.shape, device=device)
    x, gradient = batches(q, 1)[0]
    part = gradient_of(q, x, gradient)
    assert added(lambda: backward(q, x, gradient, inputs=[x])) == 0
    assert torch.equal(q.grad, torch.ones_like(q.grad)) and x.grad is not None
    assert added(lambda: backward(q, x, gradient, inputs=[q])) == 0
    assert_sum(q.grad, [torch.ones_like(part), part])


def test_node_called_by_hand(device):
    """Outside of a backward, and from a hook within another one."""
    q = parameter(device)
    q.grad = torch.ones(q.shape, device=device)
    x, gradient = batches(q, 1)[0]
    part = gradient_of(q, x, gradient)
    node = F.linear(x, q).grad_fn
    assert torch.equal(node(gradient)[1], part)
    seen = []
    other = torch.ones(2, device=device, requires_grad=True)
    other.register_hook(lambda _: seen.append(node(gradient)[1]))
    other.sum().backward()
    assert torch.equal(seen[0], part)
    assert torch.equal(q.grad, torch.ones_like(q.grad))


def test_create_graph_is_refused(device):
    q = parameter(device)
    q.grad = torch.ones(q.shape, device=device)
    x, _ = batches(q, 1)[0]
    with pytest.raises(RuntimeError, match="double backward"):
        F.linear(x, q).square().sum().backward(create_graph=True)
    assert torch.equal(q.grad, torch.ones_like(q.grad))


def test_retain_graph_and_zero_grad(device):
    q = parameter(device)
    x, gradient = batches(q, 1)[0]
    part = gradient_of(q, x, gradient)
    y = F.linear(x, q)
    for _ in range(3):
        y.backward(gradient, retain_graph=True)
    assert_sum(q.grad, [part] * 3)
    pointer = q.grad.data_ptr()
    torch.optim.SGD([q], lr=0.1).zero_grad(set_to_none=False)
    assert added(lambda: y.backward(gradient)) == 1
    assert q.grad.data_ptr() == pointer
    assert_sum(q.grad, [part])


# ---------------------------------------------------------------------- what cannot be added to


def test_leaf_that_needs_no_gradient_any_more(device):
    q = parameter(device)
    x, gradient = batches(q, 1)[0]
    backward(q, x, gradient)
    before, y = q.grad.clone(), F.linear(x, q)
    q.requires_grad_(False)
    y.backward(gradient)
    assert torch.equal(q.grad, before)


def test_weight_that_is_no_leaf(device):
    q = parameter(device, rows=256)
    part_of = torch.zeros(256, COLS, device=device)
    x, _ = batches(q, 1)[0]
    gradient = torch.randn(TOKENS, 128, device=device)
    for _ in range(2):
        assert added(lambda: backward(q[128:], x, gradient)) == 0
    part_of[128:] = gradient_of(q, x, F.pad(gradient, (128, 0)))[128:]
    assert_sum(q.grad, [part_of, part_of])


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_grad_of_another_layout(device):
    q = parameter(device)
    x, gradient = batches(q, 1)[0]
    part = gradient_of(q, x, gradient)
    q.grad = torch.ones(COLS, ROWS, device=device).t()
    assert added(lambda: backward(q, x, gradient)) == 0
    assert q.grad.stride() == (1, ROWS)
    assert_sum(q.grad, [torch.ones_like(part), part])


@pytest.mark.parametrize("which", ["input", "gradient"])
def test_grad_in_the_memory_of_an_operand(device, which):
    q = parameter(device, rows=48)
    x, gradient = batches(q, 1, tokens=48)[0]
    part = gradient_of(q, x, gradient)
    y = F.linear(x, q)
    operand = x.detach() if which == "input" else gradient
    before = operand.clone()
    q.grad = operand.view(48, 48)
    y.backward(gradient)
    assert_sum(q.grad, [before, part])


# --------------------------------------------------------------------------- around the backward


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_accumulates(device, use_reentrant):
    q = parameter(device)
    x, gradient = batches(q, 1)[0]
    part = gradient_of(q, x, gradient)

    def step():
        y = checkpoint(lambda t: F.linear(t, q), x, use_reentrant=use_reentrant)
        y.backward(gradient)

    step()
    assert added(step) == 1
    assert_sum(q.grad, [part, part])


def test_saved_tensors_elsewhere(device):
    q = parameter(device)
    x, gradient = batches(q, 1)[0]
    part = gradient_of(q, x, gradient)
    for _ in range(2):
        with torch.autograd.graph.save_on_cpu():
            y = F.linear(x, q)
        y.backward(gradient)
    assert_sum(q.grad, [part, part])


def test_threads_share_a_weight(device):
    q = parameter(device)
    q.grad = torch.zeros(q.shape, device=device)
    x = torch.ones(TOKENS, COLS, device=device)

    def work():
        for _ in range(20):
            F.linear(x, q).sum().backward()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (q.grad == 80 * TOKENS).all()


def test_compiled_code_returns_its_gradients(device):
    layer = qshard.quantize_(
        torch.nn.Sequential(torch.nn.Linear(COLS, ROWS, bias=False, device=device)),
        qshard.Float8BlockScaling(),
    )
    x, gradient = batches(layer[0].weight, 1)[0]
    part = gradient_of(layer[0].weight, x, gradient)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert added(lambda: compiled(x).backward(gradient)) == 0
    assert_sum(layer[0].weight.grad, [part, part])


def run_unsynced_microbatches():
    torch.manual_seed(0)
    model = build("float8_blockwise")
    weights = len(quantized_parameters(model))
    model.set_requires_gradient_sync(False)
    counts = [added(lambda: loss_of(model, batch(i)).backward()) for i in range(3)]
    return weights, counts


@on_worlds(2)
def test_fsdp_without_sync(world):
    """FSDP2 leaves the gradients on the unsharded parameters until it is to reduce them."""
    weights, counts = world.run(run_unsynced_microbatches)[0]
    assert weights > 0 and counts == [0, weights, weights]


# ----------------------------------------------------------------------------------------- CUDA


def test_no_second_gradient_in_memory():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    peaks = []
    for hooked in (False, True):
        q = parameter("cuda", rows=4096, cols=4096, dtype=torch.bfloat16)
        x, gradient = batches(q, 1, torch.bfloat16, tokens=512)[0]  # enough for the GEMM to be tuned
        part = gradient_of(q, x, gradient)
        if hooked:  # the ordinary way
            q.register_post_accumulate_grad_hook(lambda _: None)
        for _ in range(3):
            y = F.linear(x.detach(), q)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            y.backward(gradient)
            torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        assert_sum(q.grad, [part] * 3)
    assert peaks[0] <= peaks[1] - 0.9 * q.grad.nbytes, peaks


def test_other_streams_add_where_autograd_does():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    q = parameter("cuda")
    samples = batches(q, 2)
    parts = [gradient_of(q, *sample) for sample in samples]
    backward(q, *samples[0])
    edge = torch.autograd.graph.get_gradient_edge(q)  # on the default stream, kept
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = F.linear(samples[1][0], q)
        assert added(lambda: y.backward(samples[1][1])) == 0
    torch.cuda.current_stream().wait_stream(side)
    assert_sum(q.grad, parts)
    del edge
