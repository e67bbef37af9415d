"""torch.library.opcheck of every public operator, and shapes under meta and fake tensors."""

import pytest
import torch
from helpers import FORMATS, assert_same, has_two_images, is_quantized, ops, value, weight
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.optests import generate_tests
from torch.utils._pytree import tree_map_only

from qshard.formats import info_of

BUDGET_S = 60
TEST_UTILS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def quantized(rows=64, cols=32, fmt="float8_blockwise", keep_master=False, grad=False):
    q = ops.quantize(weight(rows, cols), fmt, keep_master=keep_master)
    return q.requires_grad_(grad)


def plain(*shape, grad=False, dtype=torch.float32):
    return weight(*shape, seed=1, dtype=dtype).requires_grad_(grad)


def experts(fmt, grad=False):
    return ops.quantize(weight(3, 64, 32), fmt).requires_grad_(grad)


def stack(fmt, rows, columns):
    return ops.quantize(weight(3, rows, columns), fmt).requires_grad_()


def offs(*ends):
    return torch.tensor(ends, dtype=torch.int32)


def targets(*shape):
    target = torch.arange(torch.Size(shape).numel()).view(shape)
    return torch.where(target == 1, -100, target)


def rows_to_meet(fmt, rows, columns, grad=False):
    """An activation that arrived in codes."""
    return ops.quantize(plain(rows, columns), info_of(fmt).activations.row_format).requires_grad_(grad)


def codes(fmt, tokens):
    """Those of a gradient of a loss, by rows and by columns, and its size."""
    *_, rows, columns = ops.cross_entropy_and_gradient(
        plain(tokens, 64), targets(tokens), grad_format=fmt, rows=True, columns=True
    )
    return rows, columns, [tokens, 64]


def dynamic(fmt, *args):
    """Arguments with a plain weight that is quantized within. Delayed scaling writes to inputs, as
    amaxes are collected there, which opcheck would take for a mistake."""
    return *args, dict(format=not_delayed(fmt), weight_state=[])


def not_delayed(fmt):
    return fmt.replace("delayed", "tensorwise")


def split(args):
    """(arguments, keyword arguments) of a sample, which may end in the latter."""
    return (args[:-1], args[-1]) if args and isinstance(args[-1], dict) else (args, {})


def tensor_scale_of(q):
    has_one = info_of(ops.format(q)).outer_scale is not None
    return {"tensor_scale_inv": ops.tensor_scale_inv(q).clone()} if has_one else {}


MEETS_ROWS = {"float8_tensorwise", "float8_blockwise", "mxfp8"}
IN_CODES = ("float8_tensorwise", "float8_blockwise")  # the gradients of a loss
MESSAGES = {"float8_blockwise": ("float8",), "mxfp8": ("mxfp8",), "nvfp4": ("nvfp4",)}
SAMPLES = {
    "quantize": lambda fmt: [
        (plain(64, 32), fmt),
        (plain(64, 32, grad=True), fmt),
        (plain(3, 32, 16, dtype=torch.bfloat16), fmt),
        (plain(0, 16), fmt),
    ],
    "from_planes": lambda fmt: [
        (ops.codes(q).clone(), ops.scale_inv(q).clone(), fmt, tensor_scale_of(q))
        for q in (quantized(fmt=fmt), quantized(32, 36, fmt))
    ],
    "from_row_image": lambda fmt: [
        (ops.row_image(rows_to_meet(fmt, 4, 36)).clone(), info_of(fmt).activations.row_format,
         dict(columns=36, dtype=torch.bfloat16))
    ] if fmt in MEETS_ROWS else [],
    "dequantize": lambda fmt: [(quantized(fmt=fmt),), (quantized(fmt=fmt, grad=True),)],
    "linear": lambda fmt: [
        (plain(4, 32), quantized(fmt=fmt)),
        (plain(4, 32, grad=True), quantized(fmt=fmt, grad=True), plain(64, grad=True)),
        (plain(2, 3, 32, grad=True), quantized(fmt=fmt, keep_master=True, grad=True), None),
        (plain(32), quantized(fmt=fmt), plain(64)),
        (plain(4, 32, grad=True), quantized(fmt=fmt, grad=True), plain(64),
         dict(residual=plain(4, 64, grad=True), input_is_kept=True)),
        dynamic(fmt, plain(2, 3, 32, grad=True), plain(64, 32, grad=True), plain(64)),
    ] + [
        (rows_to_meet(fmt, 4, 32, grad=True), quantized(fmt=fmt, grad=True), plain(64)) for _ in MEETS_ROWS & {fmt}
    ],
    "grouped_linear": lambda fmt: [
        (plain(7, 32), experts(fmt), offs(2, 2, 5)),
        (plain(7, 32, grad=True), experts(fmt, grad=True), offs(2, 2, 5)),
        (plain(7, 32, grad=True), experts(fmt, grad=True), offs(2, 2, 7), dict(weight_only=True)),
    ] + [(rows_to_meet(fmt, 7, 32, grad=True), experts(fmt, grad=True), offs(2, 2, 5)) for _ in MEETS_ROWS & {fmt}],
    # Codes exist on CUDA only (test_cuda.py).
    "quantize_input": lambda fmt: [
        (plain(*shape), fmt.replace("delayed", "tensorwise"), False, False)
        for shape in ((4, 32), (2, 3, 32))
    ],
    "linear_forward": lambda fmt: [
        (plain(2, 3, 32), quantized(fmt=fmt), plain(64), False, weight_only)
        for weight_only in (False, True)
    ]
    + [dynamic(fmt, plain(4, 32), plain(64, 32), None, False)]
    + [(plain(7, 32), experts(fmt), None, False, dict(offs=offs(2, 2, 5)))],
    "linear_backward": lambda fmt: [
        (plain(2, 3, 64), quantized(fmt=fmt), plain(2, 3, 32), False, needs_input, needs_weight)
        for needs_input, needs_weight in ((True, True), (True, False), (False, True))
    ]
    + [
        (plain(2, 64), quantized(fmt=fmt), plain(2, 32), False, *needs, False, torch.bfloat16)
        for needs in ((True, True), (True, False))
    ]
    + [dynamic(fmt, plain(2, 64), plain(64, 32), plain(2, 32), False, True, True)]
    + [
        (rows_to_meet(fmt, 7, 64), experts(fmt) if of_experts else quantized(fmt=fmt), rows_to_meet(fmt, 7, 32), False,
         True, True, dict(offs=offs(2, 2, 5)) if of_experts else {})
        for of_experts in (True, False)
        for _ in MEETS_ROWS & {fmt}
    ]
    + [
        (plain(2, 3, 64), quantized(fmt=fmt), plain(2, 3, 32), False, True, needs_weight,
         dict(input_sum=plain(2, 3, 32), weight_grad=sum))
        for needs_weight, sum in ((True, None), (True, plain(64, 32)), (False, None))
    ]
    + [
        (plain(7, 64), experts(fmt), plain(7, 32), False, *needs, dict(offs=offs(2, 2, 5), weight_grad=sum))
        for *needs, sum in ((True, True, None), (True, True, plain(3, 64, 32)), (True, False, None))
    ],
    "linear_backward_accumulate": lambda fmt: [
        (plain(2, 3, 64), quantized(fmt=fmt), plain(2, 3, 32), False, needs_input, plain(64, 32))
        for needs_input in (True, False)
    ],
    "swiglu_mlp": lambda fmt: [
        (plain(4, 32, grad=True), *weights, None, None, plain(32, grad=True),
         dict(format=fmt, down_format=fmt))
        for weights in (
            (*(quantized(fmt=fmt, grad=True) for _ in "gu"), quantized(32, 64, fmt, grad=True)),
            (quantized(128, fmt=fmt), None, quantized(32, 64, fmt, keep_master=True, grad=True)),
        )
    ]
    + [
        (plain(4, 32, grad=True), quantized(128, fmt=fmt), None, quantized(32, 64, fmt, grad=True),
         dict(format=fmt, down_format=fmt, residual=plain(4, 32, grad=True), norm_weight=plain(32, grad=True),
              eps=1e-5, rms=True))
    ]
    + [
        (plain(4, 32, grad=True), quantized(rows, fmt=fmt, grad=True), None, quantized(32, 64, fmt, grad=True),
         plain(rows, grad=True), dict(format=fmt, down_format=fmt, activation=activation))
        for rows, activation in ((64, "gelu"), (128, "sreglu"))
    ]
    + [
        (plain(4, 32, grad=True), plain(128, 32, grad=True), None, plain(32, 64, grad=True),
         dict(gate_state=[], down_state=[], **dict.fromkeys(("format", "down_format"), not_delayed(fmt))))
    ],
    "swiglu_experts": lambda fmt: [
        (plain(7, 32, grad=True), *weights, offs(2, 2, 5), dict(format=fmt, down_format=fmt))
        for weights in (
            (*(stack(fmt, 64, 32) for _ in "gu"), stack(fmt, 32, 64)),
            (stack(fmt, 128, 32), None, stack(fmt, 32, 64)),
        )
    ] + [
        (rows_to_meet(fmt, 7, 32, grad=True), *(stack(fmt, 64, 32) for _ in "gu"), stack(fmt, 32, 64), offs(2, 2, 5),
         dict(format=fmt, down_format=fmt))
        for _ in MEETS_ROWS & {fmt}
    ],
    "swiglu_linear_forward": lambda fmt: [
        (plain(2, 3, 64), plain(2, 3, 64), quantized(32, 64, fmt), bias, keeps)
        for bias, keeps in ((None, True), (plain(32), False))
    ]
    + [dynamic(fmt, plain(4, 64), plain(4, 64), plain(32, 64), None, False)]
    + [(plain(4, 64), up, quantized(32, 64, fmt), None, True, dict(activation=activation))
       for up, activation in ((None, "srelu"), (plain(4, 64), "geglu"))],
    "swiglu_linear_backward": lambda fmt: [
        (plain(2, 3, 32), *(plain(2, 3, 64) for _ in "gu"), quantized(32, 64, fmt), maxima, *needs)
        for maxima in (torch.empty(0), torch.ones(33))
        for needs in ((True, True, True, True), (False, True, False, False), (True, False, False, True))
    ]
    + [dynamic(fmt, plain(4, 32), plain(4, 64), plain(4, 64), plain(32, 64), torch.empty(0), *[True] * 4)]
    + [
        (plain(4, 32), plain(4, 64), plain(4, 64), quantized(32, 64, fmt), torch.empty(0), *[True] * 4,
         dict(weight_grad=plain(32, 64)))
    ]
    + [
        (plain(4, 32), plain(4, 64), up, quantized(32, 64, fmt), torch.empty(0), *[True] * 3, up is not None,
         dict(activation=activation, bias_grads=plain(64 if up is None else 128)))
        for up, activation in ((None, "gelu"), (plain(4, 64), "reglu"))
    ],
    "swiglu_linear_backward_accumulate": lambda fmt: [
        (plain(4, 32), plain(4, 64), plain(4, 64), quantized(32, 64, fmt), torch.empty(0),
         plain(32, 64), True, True, joined)
        for joined in (True, False)
    ],
    "linear_backward_codes": lambda fmt: [
        (*codes(f"{fmt}[emulate]", 4), torch.float32, quantized(fmt=f"{fmt}[emulate]"), plain(4, 32), False, *needs)
        for needs in ((True, True), (False, True), (False, False))
    ] if fmt in IN_CODES else [],
    "linear_backward_codes_accumulate": lambda fmt: [
        (*codes(f"{fmt}[emulate]", 4), torch.float32, quantized(fmt=f"{fmt}[emulate]"), plain(4, 32), False, True,
         plain(64, 32))
    ] if fmt in IN_CODES else [],
    "norm_linear": lambda fmt: [
        (plain(4, 32, grad=True), plain(32, grad=True), None, [quantized(fmt=fmt, grad=True)],
         dict(eps=1e-5, rms=True, zero_centered_gamma=True, format=fmt)),
        (plain(2, 3, 32, grad=True, dtype=torch.bfloat16), plain(32), plain(32),
         [quantized(fmt=fmt), quantized(32, fmt=fmt, keep_master=True, grad=True)],
         [plain(64, grad=True), plain(32)], dict(eps=1e-5, rms=False)),
    ],
    "linear_cross_entropy": lambda fmt: [
        (plain(4, 32, grad=True), quantized(fmt=fmt, grad=True), targets(4), dict(linear_bias=plain(64, grad=True))),
        (plain(2, 3, 32, grad=True), quantized(fmt=fmt), targets(2, 3),
         dict(reduction="sum", label_smoothing=0.1, forward_precision="bf16")),
        dynamic(fmt, plain(4, 32, grad=True), plain(64, 32, grad=True), targets(4)),
    ],
    "cross_entropy_and_gradient": lambda fmt: [
        (plain(4, 64), targets(4)),
        (plain(2, 3, 64, dtype=torch.bfloat16), targets(2, 3), dict(label_smoothing=0.1, rows=True)),
        (plain(4, 64), targets(4), dict(grad_format=f"{fmt}[emulate]", columns=True)),
    ] if fmt in IN_CODES else [],
    "rotary_embedding": lambda fmt: [
        (plain(2, 5, 3, 16, dtype=dtype), plain(7, channels), plain(7, channels))
        for dtype in (torch.float32, torch.bfloat16)
        for channels in (16, 6)
    ] if fmt == "float8_blockwise" else [],
    "split_rotary_embedding": lambda fmt: [
        (plain(2, 5, 6, 16, grad=grad, dtype=dtype), plain(7, channels), plain(7, channels), heads)
        for dtype, grad in ((torch.float32, True), (torch.bfloat16, False))
        for channels in (16, 6)
        for heads in ([3, 2, 1], [1, 1, 1])
    ] if fmt == "float8_blockwise" else [],
    "join_rotary_embedding": lambda fmt: [
        (plain(2, 5, 3, 16, grad=True), plain(2, 5, 2, 16, grad=True), plain(2, 5, 1, 16), plain(7, 16),
         plain(7, 16), [3, 2, 1])
    ] if fmt == "float8_blockwise" else [],
    "_sum_rows": lambda fmt: [
        (plain(7, 12, dtype=dtype), torch.tensor([0, -1, 6, 6, 6, 7]), torch.tensor([2, 2, 5]))
        for dtype in (torch.float32, torch.bfloat16)
    ] if fmt == "float8_blockwise" else [],
    # Formats of messages are their own: of each, once.
    "quantize_gradients": lambda fmt: [
        (plain(10, 10, dtype=dtype), of, 2, 50)
        for of in MESSAGES.get(fmt, ())
        for dtype in (torch.float32, torch.bfloat16)
    ],
    "sum_gradients": lambda fmt: [
        (ops.quantize_gradients(plain(10, 10), of, 2, 50)[None], of, 50, torch.empty(5, 10))
        for of in MESSAGES.get(fmt, ())
    ],
    "flush": lambda fmt: [([quantized(fmt=fmt), quantized(fmt=fmt, keep_master=True)],)],
    "formats": lambda fmt: [()],
    "format_info": lambda fmt: [(fmt,)],
    "backend_report": lambda fmt: [()],
}
# Rows of 36 codes: NVFP4's are 18 bytes, and all are padded.
ACCESSORS = {
    "codes": lambda fmt: [(quantized(64, 36, fmt),)],
    "scale_inv": lambda fmt: [(quantized(64, 36, fmt),)],
    "tensor_scale_inv": lambda fmt: [(quantized(fmt=fmt),)] if info_of(fmt).outer_scale else [],
    "columnwise_codes": lambda fmt: [(quantized(64, 36, fmt),)] if has_two_images(fmt) else [],
    "columnwise_scale_inv": lambda fmt: [(quantized(64, 36, fmt),)] if has_two_images(fmt) else [],
    "row_image": lambda fmt: [(rows_to_meet(fmt, 4, 36),)] if fmt in MEETS_ROWS else [],
    "master": lambda fmt: [(quantized(fmt=fmt, keep_master=k),) for k in (True, False)],
    "is_quantized": lambda fmt: [(quantized(fmt=fmt),), (plain(3, 3),)],
    "format": lambda fmt: [(quantized(fmt=fmt),)],
}


@pytest.fixture(autouse=True)
def opcheck_copies_quantized_tensors(monkeypatch):
    """opcheck copies its inputs into fresh memory found by data_ptr(); a quantized tensor has clone().
    Without this the operators would be checked on plain tensors."""
    stock = generate_tests.clone_input

    def clone_input(x, **kwargs):
        if not is_quantized(x):
            return stock(x, **kwargs)
        return x.detach().clone().requires_grad_(x.requires_grad)

    monkeypatch.setattr(generate_tests, "clone_input", clone_input)


@pytest.fixture(autouse=True)
def opcheck_compares_strings(monkeypatch):
    stock = torch.testing.assert_close

    def assert_close(actual, expected, **kwargs):
        if isinstance(expected, str) or (isinstance(expected, list) and isinstance(expected[0], str)):
            assert actual == expected
        else:
            stock(actual, expected, **kwargs)

    monkeypatch.setattr(torch.testing, "assert_close", assert_close)


@pytest.fixture(autouse=True)
def opcheck_compares_float8(monkeypatch):
    """Its test of schemas compares inputs by arithmetic that types of one byte do not have."""
    stock = torch.allclose

    def allclose(left, right, **kwargs):
        if left.itemsize > 1 or not left.is_floating_point():
            return stock(left, right, **kwargs)
        return torch.equal(left.view(torch.uint8), right.view(torch.uint8))

    monkeypatch.setattr(torch, "allclose", allclose)


@pytest.mark.each_value
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", SAMPLES)
def test_operators_pass_opcheck(name, fmt):
    for args in SAMPLES[name](fmt):
        args, kwargs = split(args)
        torch.library.opcheck(getattr(ops, name).default, args, kwargs, test_utils=TEST_UTILS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, for codes of gradients")
@pytest.mark.parametrize("fmt", ["float8_tensorwise", "float8_blockwise"])
def test_opcheck_of_codes_between_linears(fmt):
    def check(op, *args):
        # In test_aot_dispatch_dynamic bytes behind codes would differ, which nothing writes or reads.
        utils = ("test_schema", "test_faketensor")
        torch.library.opcheck(getattr(ops, op).default, args, test_utils=utils)
        return getattr(ops, op)(*args)

    gate, down = quantized(256, 128, fmt).cuda(), quantized(128, 256, fmt).cuda()
    x, grad = (plain(64, 128, dtype=torch.bfloat16).cuda() for _ in "xg")
    inner = [plain(64, 256, dtype=torch.bfloat16).cuda() for _ in "gu"]
    _, maxima = check("swiglu_linear_forward", *inner, down, None, True)
    _, *codes = check("swiglu_linear_backward", grad, *inner, down, maxima, *[True] * 3, False, fmt)
    rows, columns = codes[:2]
    gradient = (rows, columns, [64, 256], x.dtype, gate, x, False, True)
    grad_input, _ = check("linear_backward_codes", *gradient, True)
    total = x.clone()
    none, _ = check("linear_backward_codes", *gradient, True, None, None, None, total)
    assert none.numel() == 0
    total = x.clone()
    ops.linear_backward_codes(*gradient, False, None, None, None, total)
    assert total._version == 1
    torch.testing.assert_close(total, x + grad_input)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, for codes of inputs")
@pytest.mark.parametrize("fmt", ["float8_tensorwise", "float8_blockwise"])
def test_opcheck_of_codes_of_a_norm(fmt):
    x, gamma = (plain(*size, grad=True, dtype=torch.bfloat16).cuda() for size in ((64, 128), (128,)))
    weights = [quantized(rows, 128, fmt).cuda().requires_grad_() for rows in (256, 64)]
    options = {"eps": 1e-5, "rms": True, "format": fmt}
    # With symbols for sizes it is the composition, whose normalization rounds elsewhere.
    utils = [name for name in TEST_UTILS if name != "test_aot_dispatch_dynamic"]
    torch.library.opcheck(ops.norm_linear.default, (x, gamma, None, weights), options, test_utils=utils)

    def check(op, *args):
        utils = ("test_schema", "test_faketensor")  # bytes behind codes differ, which nothing writes or reads
        args = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
        torch.library.opcheck(getattr(ops, op).default, args, test_utils=utils)
        return getattr(ops, op)(*args)

    below = [w.detach() for w in weights]
    _, statistics, amax = check("_norm_linear_forward", x, gamma, None, below, None, 1e-5, True, False, fmt)
    amax = amax if amax.numel() else None
    check("_quantize_normalized", x, gamma, None, 1e-5, True, False, fmt, True, True, statistics, amax)
    _, amax = check("_quantize_kept_input", x, fmt, False)
    check("_quantize_kept_input", x, fmt, True, amax if amax.numel() else None)
    for needs_parameters in (True, False):
        check("_normalize_backward", x, x, gamma, statistics, False, needs_parameters, x)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", ACCESSORS)
def test_opcheck_of_accessors(name, fmt, monkeypatch):
    # opcheck clones inputs in traced code, where clone() is torch's and knows no format (test_fakes.py).
    monkeypatch.setattr(torch, "clone", lambda tensor: tensor)
    for args in ACCESSORS[name](fmt):
        torch.library.opcheck(getattr(ops, name).default, args, test_utils=TEST_UTILS)


def test_every_public_operator_is_checked():
    names = {
        schema.name.removeprefix("qshard::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("qshard::")
    }
    public = {name for name in names if not name.startswith("_")}
    assert public == {name for name in (*SAMPLES, *ACCESSORS) if not name.startswith("_")}


@pytest.mark.parametrize("name", ["quantize", "dequantize", "linear", "linear_backward"])
def test_fake_results_have_the_geometry_of_real_ones(name):
    for args in SAMPLES[name]("float8_blockwise"):
        args, kwargs = split(args)
        real = getattr(ops, name)(*args, **kwargs)
        with FakeTensorMode() as mode:
            fake_args, fake_kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
            fake = getattr(ops, name)(*fake_args, **fake_kwargs)
        for r, f in zip(*((t,) if isinstance(t, torch.Tensor) else t for t in (real, fake))):
            assert (f.shape, f.dtype, f.device) == (r.shape, r.dtype, r.device)
            assert f.stride() == r.stride() and f.requires_grad == r.requires_grad


def test_tracing_records_one_node_per_operator():
    x, q = plain(4, 32), quantized()

    def function(x, q):
        return ops.linear(x, q) * ops.dequantize(q).sum()

    graph = make_fx(function, tracing_mode="symbolic")(x, q)
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert "qshard.linear_forward.default" in targets or "qshard.linear.default" in targets
    assert "qshard.dequantize.default" in targets
    assert_same(graph(x, q), function(x, q))


@pytest.mark.parametrize("keep_master", [False, True], ids=["no master", "master"])
def test_operators_run_on_the_meta_device(keep_master):
    values = torch.empty(20, 32, device="meta")
    q = ops.quantize(values, "float8_blockwise", keep_master=keep_master)
    assert is_quantized(q) and q.is_meta and q.shape == (20, 32)
    x = torch.empty(2, 3, 32, device="meta")
    for result, shape in (
        (ops.linear(x, q), (2, 3, 20)),
        (torch.nn.functional.linear(x, q), (2, 3, 20)),
        (ops.dequantize(q), (20, 32)),
        (q[3:5], (2, 32)),
        (q.t(), (32, 20)),
        (q.clone(), (20, 32)),
        (q + 1, (20, 32)),
        (q.mul_(2), (20, 32)),
        (q.normal_(), (20, 32)),
        (torch.empty_like(q), (20, 32)),
        (torch.zeros_like(q), (20, 32)),
    ):
        assert result.is_meta and result.shape == shape
    ops.flush([q])
    real = torch.empty_like(q, device="cpu")
    with torch.no_grad():
        real.copy_(weight(20, 32))
    assert_same(
        ops.dequantize(real), ops.dequantize(ops.quantize(weight(20, 32), "float8_blockwise"))
    )


def test_module_to_empty():
    """Meta init: the kind survives to_empty, and an initialiser writes values."""
    with torch.device("meta"):
        layer = torch.nn.Linear(32, 20)
    layer.weight = torch.nn.Parameter(
        ops.quantize(layer.weight, "float8_blockwise", keep_master=True)
    )
    layer.to_empty(device="cpu")
    assert is_quantized(layer.weight) and not layer.weight.is_meta
    torch.manual_seed(3)
    layer.reset_parameters()
    torch.manual_seed(3)
    plain_layer = torch.nn.Linear(32, 20)
    assert_same(layer.weight, plain_layer.weight)
    assert_same(layer.bias, plain_layer.bias)
    assert value(layer.weight).any()
