"""Linears of one activation share its codes, and no linear multiplies codes of what its input was.

Which inputs are shared is decided on any device (`ops/linear/recorded_activation.h`); only Hopper's FP8
linears have codes to share.
"""

import ctypes

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dist_helpers import device as rank_device
from dist_helpers import full_mesh, on_worlds
from helpers import are_codes_of
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from qshard._runtime.classes import Process

ops = torch.ops.qshard
SHARING = ("float8_tensorwise", "float8_blockwise")
FP8_FORMATS = (*SHARING, "float8_delayed")  # whose linears scale an input by their own history
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ("cpu", pytest.param("cuda", marks=needs_cuda))
B16 = torch.bfloat16
K = 256


# ------------------------------------------------------------------------------- the rule


class FusedNorm(torch.autograd.Function):
    """As Triton's norms: rows of a matrix of their own, returned in the input's shape."""

    @staticmethod
    def forward(ctx, x):
        y = F.layer_norm(x.view(-1, x.shape[-1]), x.shape[-1:])
        return y.view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Returning(torch.autograd.Function):
    """function(buffer), recorded as an output of `x`; the buffer is the caller's."""

    @staticmethod
    def forward(ctx, x, buffer, function):
        return function(buffer)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


class Identity(torch.autograd.Function):
    """What FSDP2 puts around the inputs of a module."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def leaf(device, *shape):
    return torch.randn(*(shape or (2, 8, K)), device=device, requires_grad=True)


def norm(x):
    return F.rms_norm(x, (K,))


def handmade_norm(x):
    wide = x.float()
    normed = wide * wide.square().mean(-1, True).rsqrt()
    return torch.ones(K, device=x.device) * normed.to(x.dtype)


def read_by_others(x):
    """A router and an adapter read it first, and keep it for backward."""
    x.kept = [F.linear(x, torch.ones(4, K, device=x.device, requires_grad=True)), x.view(-1, K)]
    return x


def quantized_linear(x):
    w = torch.nn.Parameter(ops.quantize(torch.randn(K, K, device=x.device), "float8_tensorwise"))
    return F.linear(x, w)


ACTIVATIONS = {
    "norm": norm,
    "norm module": lambda x: torch.nn.RMSNorm(K).to(x.device)(x),
    "norm module in bfloat16": lambda x: torch.nn.RMSNorm(K).to(x.device, B16)(x.to(B16)),
    "layer norm": lambda x: torch.nn.LayerNorm(K, device=x.device)(x),
    "handmade norm": handmade_norm,
    "fused norm": lambda x: FusedNorm.apply(x),
    "fused norm of an activation": lambda x: FusedNorm.apply(norm(x)),
    "its own memory from a function": lambda x: Returning.apply(x, x.detach(), torch.clone),
    "activation function": F.silu,
    "dropout": lambda x: F.dropout(norm(x), 0.5),
    "cast": lambda x: x.to(B16),
    "copy": lambda x: x.clone(),
    "quantized linear": quantized_linear,
    "quantized linear of a matrix": lambda x: quantized_linear(x.view(-1, K)),
    "plain linear": lambda x: F.linear(x, torch.ones(K, K, device=x.device)),
    "tokens of all sequences": lambda x: norm(x).view(-1, K),
    "transposed": lambda x: norm(x).transpose(0, 1),
    "part": lambda x: norm(x).chunk(2)[1],
    "view of a view": lambda x: norm(x).view(-1, K).unsqueeze(0),
    "read by others": lambda x: read_by_others(norm(x)),
    "input of a checkpoint": lambda x: checkpointed(norm(x), use_reentrant=False),
    "within a checkpoint": lambda x: checkpointed(x, use_reentrant=False, before=norm),
    "within a reentrant checkpoint": lambda x: checkpointed(x, use_reentrant=True, before=norm),
}


def checkpointed(x, use_reentrant, before=lambda x: x):
    """What a linear in a checkpoint gets when it is computed again."""
    seen = []

    def function(x):
        seen.append(before(x))
        return seen[-1].square()

    checkpoint(function, x, use_reentrant=use_reentrant).sum().backward()
    assert len(seen) == 2
    return seen[1]


def returned_buffer(function, kept=lambda buffer: buffer):
    """What an autograd function returns of a buffer that something keeps."""

    def make(x):
        buffer = torch.zeros_like(x, requires_grad=False)
        y = Returning.apply(x, buffer, function)
        y.kept = kept(buffer), buffer
        return y

    return make


def copied_into(x):
    return torch.zeros_like(x, requires_grad=False).copy_(norm(x))[:1]


def view_of_dropped_leaf(x):
    return leaf(x.device).view(-1, K)


def inference(x):
    with torch.inference_mode():
        return norm(x)


NOT_SHARED = {
    "leaf": lambda x: x,
    "no leaf of autograd's": lambda x: x.detach(),
    "detached activation": lambda x: norm(x).detach(),
    "detached activation that requires grad": lambda x: norm(x).detach().requires_grad_(),
    "activation detached in place": lambda x: norm(x).detach_().requires_grad_(),
    "view of a leaf": lambda x: x.view(-1, K),
    "reshaped leaf": lambda x: x.reshape(4, 4, K),
    "transposed leaf": lambda x: x.transpose(0, 1),
    "part of a leaf": lambda x: x.chunk(2)[0],
    "rows of a leaf": lambda x: x[0, 2:],
    "expanded leaf": lambda x: x[:1].expand(5, 8, K),
    "leaf in its own dtype": lambda x: x.to(x.dtype).contiguous(),
    "view of a leaf that is gone": view_of_dropped_leaf,
    "leaf that a function returns": lambda x: Identity.apply(x),
    "leaf that functions return": lambda x: Identity.apply(Identity.apply(x)).view(-1, K),
    "alias of a leaf from a function": lambda x: Returning.apply(x, x, torch.detach),
    "alias of a buffer from a function": returned_buffer(torch.detach),
    "part of a buffer from a function": returned_buffer(lambda b: b[:1], kept=lambda b: b[1:]),
    "buffer that an activation was copied into": copied_into,
    "written activation": lambda x: norm(x).add_(1),
    "view of a written activation": lambda x: norm(x).add_(1).view(-1, K),
    "input of a reentrant checkpoint": lambda x: checkpointed(norm(x), use_reentrant=True),
    "leaf in a checkpoint": lambda x: checkpointed(x, use_reentrant=False),
    "inference": inference,
    "quantized": lambda x: ops.quantize(norm(x).view(-1, K), "float8_tensorwise"),
}


@pytest.mark.parametrize("device", DEVICES)
def test_linears_share_codes_of_activations_alone(device):
    wrong = []
    for shares, cases in ((True, ACTIVATIONS), (False, NOT_SHARED)):
        for name, make in cases.items():
            x = make(leaf(device))
            if Process.shares_input_codes(x) != shares:
                wrong.append(f"{name}: {'not ' * shares}shared, {type(x.grad_fn).__name__}")
    assert not wrong, wrong


def under_fsdp2(param_dtype):
    """Whether a linear of a wrapped module shares its input, and that of a norm within."""
    seen = []

    class Stage(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(K, K)

        def forward(self, x):
            seen.append((Process.shares_input_codes(x), Process.shares_input_codes(norm(x))))
            return self.linear(x)

    model = torch.nn.Sequential(Stage()).to(rank_device())
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    fully_shard(model[0], mesh=full_mesh(), mp_policy=policy)
    fully_shard(model, mesh=full_mesh(), mp_policy=policy)
    assert isinstance(model, FSDPModule)
    model(leaf(rank_device())).float().sum().backward()
    return seen


@on_worlds(1)
def test_inputs_of_fsdp2_modules(world):
    """FSDP2 passes views of a leaf, in mixed precision copies of it."""
    assert world.run(under_fsdp2, None) == [[(False, True)]]
    assert world.run(under_fsdp2, torch.bfloat16) == [[(True, True)]]


# ---------------------------------------------------------------------------- never stale


def three_linears(format):
    torch.manual_seed(0)
    weights = torch.randn(3, 64, K, device="cuda")
    return [torch.nn.Parameter(ops.quantize(w, format)) for w in weights]


def tokens(*shape, **kwargs):
    return torch.randn(*(shape or (64, K)), device="cuda", dtype=B16, **kwargs)


@needs_cuda
def test_linears_captured_together_quantize_once():
    weights = three_linears("float8_blockwise")
    x, graph, saved = tokens(requires_grad=True), torch.cuda.CUDAGraph(), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    F.linear(norm(x), weights[0])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph), hooks:
        h = norm(x)
        outputs = [F.linear(h, w) for w in weights]
    codes = [t for t in saved if t.dtype == torch.uint8 and not are_codes_of(t, *weights)]
    assert len({t.data_ptr() for t in codes}) == 1
    for _ in range(2):
        x.data.copy_(tokens())
        graph.replay()
        for y, w in zip(outputs, weights):
            assert torch.equal(y, F.linear(norm(x), w))


def check_product(x, w):
    """The product of what x holds now, whatever it held when it was last seen."""
    assert torch.equal(F.linear(x, w), F.linear(x.detach().clone(), w))


WRITES = {
    "add_": lambda x: x.add_(1),
    "detached add_": lambda x: x.detach().add_(1),
    "copy_": lambda x: x.copy_(tokens()),
    "data": lambda x: replace_data(x, tokens()),
}


def write_raw(x, values):
    """As a kernel of another library: torch sees nothing of it."""
    x, values = x.detach(), values.contiguous()
    assert x.is_contiguous() and x.nbytes == values.nbytes
    torch.cuda.synchronize()
    driver = ctypes.CDLL("libcuda.so.1")
    pointers = ctypes.c_uint64(x.data_ptr()), ctypes.c_uint64(values.data_ptr())
    assert driver.cuMemcpyDtoD_v2(*pointers, ctypes.c_size_t(x.nbytes)) == 0
    torch.cuda.synchronize()


def write_through_alias(x, values):
    x.data.copy_(values)


def replace_data(x, values):
    x.data = values


@needs_cuda
@pytest.mark.parametrize("write", [write_raw, write_through_alias, replace_data])
@pytest.mark.parametrize("format", FP8_FORMATS)
def test_leaf_written_unseen_is_quantized_again(format, write):
    w = three_linears(format)[0]
    x = tokens(requires_grad=True)
    view = x.view(4, 16, K)
    for _ in range(3):
        check_product(x, w)
        check_product(view, w)
        write(x, tokens())


@needs_cuda
@pytest.mark.parametrize("format", SHARING)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_written_activation_is_quantized_again(format, write):
    w = three_linears(format)[0]
    x = norm(tokens(requires_grad=True))
    F.linear(x, w)
    with torch.no_grad():
        write(x)
    check_product(x, w)


@needs_cuda
@pytest.mark.parametrize("function", [lambda b: b, torch.detach, lambda b: b[:]])
@pytest.mark.parametrize("format", SHARING)
def test_buffer_that_a_function_fills_again_is_quantized_again(format, function):
    weights = three_linears(format)
    x, buffer = tokens(requires_grad=True), tokens()
    for _ in range(3):
        write_raw(buffer, tokens())
        y = Returning.apply(x, None, lambda _: function(buffer))
        for w in weights:
            check_product(y, w)


@needs_cuda
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inputs_of_inference_are_quantized_each_time(mode):
    """Kernels that write them may bypass the version counter."""
    w = three_linears("float8_blockwise")[0]
    with mode():
        x = tokens()
        F.linear(x, w)
        x.data.add_(1)
        check_product(x, w)


@needs_cuda
def test_captured_graph_quantizes_an_input_seen_before():
    w = three_linears("float8_blockwise")[0]
    x = norm(tokens(requires_grad=True))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    F.linear(x, w)
    with torch.cuda.stream(stream):
        F.linear(x, w)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            y = F.linear(x, w)
        write_raw(x, tokens())
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, F.linear(x.detach().clone(), w))


@needs_cuda
@pytest.mark.parametrize("eager", ["default stream", "stream of the capture"])
def test_activation_that_a_replay_writes_is_quantized_again(eager):
    w = three_linears("float8_blockwise")[0]
    x, graph, stream = tokens(requires_grad=True), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    norm(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        h = norm(x)
    with torch.cuda.stream(torch.cuda.default_stream() if eager == "default stream" else stream):
        for _ in range(3):
            x.data.copy_(tokens())
            graph.replay()
            check_product(h, w)
            torch.cuda.synchronize()


@needs_cuda
def test_outputs_of_graphed_callables_are_quantized_again():
    w = three_linears("float8_blockwise")[0]
    module = torch.nn.RMSNorm(K, device="cuda", dtype=B16)
    graphed = torch.cuda.make_graphed_callables(module, (tokens(requires_grad=True),))
    first = graphed(tokens(requires_grad=True))
    for _ in range(3):
        check_product(first, w)  # a replay writes it too
        check_product(graphed(tokens(requires_grad=True)), w)


def receive_twice(formats):
    """Rank 0 sends; whether rank 1 multiplied by what it received, for each format."""
    right = {}
    for format in formats:
        weights = three_linears(format)
        buffer = torch.empty(64, K, device=rank_device(), dtype=B16, requires_grad=True)
        for step in range(3):
            if dist.get_rank() == 0:
                dist.send(tokens(), 1)
            else:
                dist.recv(buffer, 0)
                right[format, step] = all(
                    torch.equal(F.linear(buffer, w), F.linear(buffer.detach().clone(), w))
                    for w in weights
                )
    return right


@on_worlds(2, devices=("cuda",))
def test_received_input_is_quantized_again(world):
    _, right = world.run(receive_twice, FP8_FORMATS)
    assert len(right) == 3 * len(FP8_FORMATS) and all(right.values()), right
