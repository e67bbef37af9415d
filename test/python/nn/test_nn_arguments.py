"""What arguments of qshard.nn's modules do: main_grad, microbatches, generators, quantized_model_init,
initial values; and what is refused, by name."""

import contextlib
import copy
import inspect
import io

import pytest
import torch
import torch.nn.functional as F
from nn_helpers import RECIPES, assert_bits, on_devices, randomize
from torch.utils.checkpoint import checkpoint

import qshard
from qshard import nn
from qshard._runtime.classes import TensorState

RECIPE = qshard.Float8BlockScaling()
MODULES = {
    "Linear": lambda **kwargs: nn.Linear(32, 64, **kwargs),
    "LayerNormLinear": lambda **kwargs: nn.LayerNormLinear(32, 64, **kwargs),
    "LayerNormMLP": lambda **kwargs: nn.LayerNormMLP(32, 64, **kwargs),
}
MLPS = {"SwiGLU": lambda **kwargs: nn.LayerNormMLP(32, 64, activation="swiglu", **kwargs)}


def input_of(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------ main_grad


def weights_of(module):
    return [getattr(module, name) for name in module.weight_names]


@on_devices
@pytest.mark.pairwise
@pytest.mark.parametrize("format", [None, *RECIPES])
@pytest.mark.parametrize("kind", [*MODULES, *MLPS])
@pytest.mark.parametrize("first", [None, True, False])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_wgrad_goes_into_main_grad(device, format, kind, first, grad_dtype):
    """What .grad would get; .grad stays None, and other gradients are as ever."""
    make = {**MODULES, **MLPS}[kind]
    usual, fused = (make(device=device, fuse_wgrad_accumulation=f) for f in (False, True))
    for module in (usual, fused):
        randomize(module)
        if format is not None:
            qshard.quantize_(module, RECIPES[format], filter_fn=lambda *_: True)
    for weight in weights_of(fused):
        weight.main_grad = torch.full(weight.shape, 2.0, dtype=grad_dtype, device=device)
    x = input_of(7, 32).to(device)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    usual(inputs[0]).square().sum().backward()
    fused(inputs[1], is_first_microbatch=first).square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    for name, parameter in usual.named_parameters():
        other = fused.get_parameter(name)
        if name not in usual.weight_names:
            torch.testing.assert_close(other.grad, parameter.grad)
            continue
        assert other.grad is None
        kept = 0.0 if first else 2.0
        tolerance = 1e-4 if grad_dtype == torch.float32 else 1e-2
        torch.testing.assert_close(
            other.main_grad.float(), parameter.grad + kept, rtol=tolerance, atol=tolerance
        )


@on_devices
@pytest.mark.pairwise
@pytest.mark.parametrize("kind,operators", [
    ("LayerNormLinear", {"linear_backward"}),
    ("SwiGLU", {"swiglu_mlp", "swiglu_linear_backward"}),
], ids=["linear", "mlp"])
@pytest.mark.parametrize("format", RECIPES)
@pytest.mark.parametrize("recompute", [False, True])
def test_main_grad_is_summed_by_the_operators(device, format, kind, operators, recompute):
    """Bits of what they add to a .grad that is there, in the same operators."""
    make = {**MODULES, **MLPS}[kind]
    usual, fused = (make(device=device, fuse_wgrad_accumulation=f) for f in (False, True))
    for module in (usual, fused):
        qshard.quantize_(randomize(module), RECIPES[format], filter_fn=lambda *_: True)
    for own, weight in zip(weights_of(usual), weights_of(fused)):
        own.grad, weight.main_grad = (torch.zeros(weight.shape, device=device) for _ in range(2))
    results = []
    for module in (usual, fused):
        with torch.profiler.profile(acc_events=True) as profiler:
            for seed in (1, 2):
                x = input_of(7, 32, seed=seed).to(device).requires_grad_()
                y = checkpoint(module, x, use_reentrant=False) if recompute else module(x)
                y.square().sum().backward()
        ran = {event.key for event in profiler.key_averages()}
        assert {f"qshard::{name}" for name in operators} <= ran
        results.append((y.detach(), x.grad))
    assert_bits(*results)
    assert_bits([w.main_grad for w in weights_of(fused)], [w.grad for w in weights_of(usual)])


@on_devices
@pytest.mark.parametrize("format", [None, "float8_tensorwise", "float8_blockwise", "mxfp8"])
@pytest.mark.parametrize("kind", [*MODULES, *MLPS])
@pytest.mark.parametrize("first", [None, True])
def test_main_grad_of_a_backward_that_creates_a_graph(device, format, kind, first):
    """The same numbers; autograd gives leaves other tensors then."""
    make, results = {**MODULES, **MLPS}[kind], []
    for create_graph in (False, True):
        module = randomize(make(device=device, fuse_wgrad_accumulation=True))
        if format is not None:
            qshard.quantize_(module, RECIPES[format], filter_fn=lambda *_: True)
        given = [torch.full(weight.shape, 2.0, device=device) for weight in weights_of(module)]
        for weight, main_grad in zip(weights_of(module), given):
            weight.main_grad = main_grad
        for seed in (1, 2):
            x = input_of(7, 32, seed=seed).to(device).requires_grad_()
            module(x, is_first_microbatch=first).sum().backward(create_graph=create_graph)
        assert all(weight.main_grad is main_grad for weight, main_grad in zip(weights_of(module), given))
        assert not any(main_grad.requires_grad for main_grad in given)
        results.append(given)
    torch.testing.assert_close(results[0], results[1])


def test_main_grad_is_required_and_may_be_overwritten():
    module = nn.LayerNormLinear(32, 48, fuse_wgrad_accumulation=True)
    x = input_of(7, 32)
    with pytest.raises(RuntimeError, match=r"main_grad.*\(48, 32\); this weight has none"):
        module(x)
    module.weight.main_grad = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"has one of shape \(3,\)"):
        module(x)
    with torch.no_grad():
        assert module(x).shape == (7, 48)
    module.weight.main_grad = torch.full((48, 32), 5.0)
    module.weight.overwrite_main_grad = True
    module.weight.grad_added_to_main_grad = False
    module(x).sum().backward()
    assert module.weight.grad_added_to_main_grad
    assert module.weight.grad.count_nonzero() == 0  # what Megatron's hooks wait for
    other = copy.deepcopy(module)
    other.fuse_wgrad_accumulation = False
    other.weight.grad = None
    other(x).sum().backward()
    torch.testing.assert_close(module.weight.main_grad, other.weight.grad)


# ---------------------------------------------------------------- Linear, as nn.Linear and te's


@on_devices
@pytest.mark.parametrize("format", [None, "float8_tensorwise", "nvfp4"])
def test_linear_is_nn_linear(device, format):
    torch.manual_seed(3)
    plain = torch.nn.Linear(32, 48, device=device)
    torch.manual_seed(3)
    module = nn.Linear(32, 48, device=device)
    assert_bits(module.state_dict(), plain.state_dict())
    if format:
        qshard.quantize_(torch.nn.Sequential(plain), RECIPES[format])
        qshard.quantize_(torch.nn.Sequential(module), RECIPES[format])
    x = input_of(2, 3, 32).to(device)
    assert_bits(module(x), plain(x))
    both = nn.Linear(32, 48, device=device, return_bias=True)
    both.load_state_dict(module.state_dict())
    y, bias = both(x)
    assert torch.equal(y, F.linear(x, both.weight))
    assert torch.equal(bias, both.bias) and bias.data_ptr() != both.bias.data_ptr()  # FSDP frees its own


def test_linear_without_bias_and_back_to_plain():
    module = nn.Linear(32, 48, bias=False, return_bias=True, params_dtype=torch.bfloat16)
    x = input_of(5, 32).bfloat16()
    y, bias = module(x)
    assert bias.shape == (0,) and bias.dtype == torch.bfloat16
    del y
    qshard.quantize_(module, RECIPE)
    qshard.dequantize_(module)
    assert type(module) is nn.Linear and not qshard.is_quantized(module.weight)
    assert_bits(module(x)[0], F.linear(x, module.weight))
    adopted = torch.nn.Sequential(torch.nn.Linear(8, 8))
    qshard.dequantize_(qshard.quantize_(adopted, RECIPE))
    assert type(adopted[0]) is torch.nn.Linear


def test_linear_of_parts_has_no_whole_weight():
    module = nn.Linear(32, 48, parameters_split=("query_", "key", "value"))
    assert [n for n, _ in module.named_parameters()] == [
        "query_weight", "key_weight", "value_weight", "query_bias", "key_bias", "value_bias"
    ]
    qshard.quantize_(module, qshard.DelayedScaling(), filter_fn=lambda *_: True)
    x = input_of(5, 32)
    parts = [F.linear(x, getattr(module, f"{p}_weight"), getattr(module, f"{p}_bias"))
             for p in ("query", "key", "value")]
    assert_bits(module(x), torch.cat(parts, -1))
    state = set(TensorState(module.key_weight.detach()).scaling_state())
    assert state and {f"{part}_weight_{name}" for part in ("query", "key", "value") for name in state} == {
        name for name, _ in module.named_buffers()
    }


# ------------------------------------------------------------------------- initial values


class Tracker:
    def __init__(self):
        self.names = []

    @contextlib.contextmanager
    def fork(self, name="default"):
        self.names.append(name)
        with torch.random.fork_rng():
            torch.manual_seed(17)
            yield


@pytest.mark.parametrize("kind", MODULES)
def test_init_methods_and_trackers(kind):
    tracker = Tracker()
    methods = {"init_method": lambda w: torch.nn.init.constant_(w, 2.0)}
    if kind == "LayerNormMLP":
        methods["output_layer_init_method"] = lambda w: torch.nn.init.constant_(w, 3.0)
    module = MODULES[kind](get_rng_state_tracker=lambda: tracker, **methods)
    values = [weight.unique().item() for weight in weights_of(module)]
    assert values == [2.0, 3.0][: len(values)] and len(tracker.names) == len(values)
    biases = [p for n, p in module.named_parameters() if n.endswith("bias")]
    assert biases and all((bias == 0).all() for bias in biases)
    torch.manual_seed(17)
    expected = torch.empty(weights_of(module)[0].shape).normal_(0, 0.023)
    drawn = MODULES[kind](get_rng_state_tracker=lambda: tracker,
                          init_method=lambda w: torch.nn.init.normal_(w, 0, 0.023))
    assert_bits(weights_of(drawn)[0].detach(), expected)


def test_a_tracker_is_asked_by_its_name():
    tracker = Tracker()
    nn.Linear(8, 8, get_rng_state_tracker=lambda: tracker, rng_tracker_name="model-parallel-rng")
    assert tracker.names == ["model-parallel-rng"]


@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP"])
def test_default_initial_values(kind):
    torch.manual_seed(0)
    module = {"LayerNormLinear": nn.LayerNormLinear, "LayerNormMLP": nn.LayerNormMLP}[kind](256, 512)
    for weight in weights_of(module):
        assert weight.std().item() == pytest.approx(0.023, rel=0.02)
        assert abs(weight.mean().item()) < 1e-3
    assert (module.layer_norm_weight == 1).all() and (module.layer_norm_bias == 0).all()


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("quantized", [False, True])
def test_meta_and_reset_parameters(kind, quantized):
    torch.manual_seed(5)
    expected = MODULES[kind]()
    module = MODULES[kind](device="meta")
    if quantized:
        qshard.quantize_(module, RECIPE, filter_fn=lambda *_: True)
    assert all(p.is_meta for p in module.parameters())
    module.to_empty(device="cpu")
    module.reset_parameters(defer_init=True)
    torch.manual_seed(5)
    module.reset_parameters()
    qshard.flush(module)
    for name, parameter in module.named_parameters():
        assert_bits(parameter.detach() + 0, expected.get_parameter(name).detach() + 0)


# ------------------------------------------------------------------- quantized_model_init


@pytest.mark.parametrize("format", RECIPES)
@pytest.mark.parametrize("kind", MODULES)
def test_quantized_model_init(format, kind):
    arguments = {"params_dtype": torch.bfloat16}
    make = MODULES[kind]
    torch.manual_seed(0)
    expected = qshard.quantize_(make(**arguments), RECIPES[format], filter_fn=lambda *_: True)
    torch.manual_seed(0)
    with qshard.quantized_model_init(recipe=RECIPES[format]):
        module = make(**arguments)
        stock = torch.nn.Linear(8, 8)
    x = input_of(5, 32).bfloat16()
    assert_bits(module(x), expected(x))
    assert not qshard.is_quantized(stock.weight)
    assert module.weight_format == RECIPES[format].format
    later = make(**arguments)
    assert not any(qshard.is_quantized(p) for p in later.parameters())


def test_quantized_model_init_of_layers():
    with qshard.quantized_model_init(recipe=RECIPE, keep_master=False, weight_only=True):
        layer = nn.TransformerLayer(32, 64, 4, device="meta")
        with qshard.quantized_model_init(enabled=False):
            plain = nn.LayerNormLinear(8, 8)
    quantized = [n for n, p in layer.named_parameters() if qshard.is_quantized(p)]
    assert len(quantized) == 6 and not qshard.is_quantized(plain.weight)
    assert layer.self_attention.proj.weight_only
    assert torch.ops.qshard.master(layer.self_attention.proj.weight.detach()) is None
    with pytest.raises(TypeError, match="expected a recipe"), qshard.quantized_model_init():
        pass


@pytest.mark.parametrize("kind", MODULES)
def test_copies_and_pickles(kind):
    with qshard.quantized_model_init(recipe=RECIPE):
        module = MODULES[kind]()
    x = input_of(5, 32)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(module), torch.load(buffer, weights_only=False)):
        assert_bits(other(x), module(x))
        other.reset_parameters()


# ------------------------------------------------------------------------------- refusals

REFUSED = {
    "ub_overlap_ag": True, "ub_overlap_rs": True, "ub_overlap_rs_dgrad": True, "ub_bulk_dgrad": True,
    "ub_bulk_wgrad": True, "delay_wgrad_compute": True, "symmetric_ar_type": "two_shot", "tp_size": 2,
}


def arguments_of(kind):
    return inspect.signature(getattr(nn, kind)).parameters


@pytest.mark.parametrize(
    "kind,argument",
    [(kind, argument) for kind in (*MODULES, "MultiheadAttention") for argument in REFUSED
     if argument in arguments_of(kind)],
)
def test_refused_by_name(kind, argument):
    make = MODULES.get(kind, lambda **kwargs: nn.MultiheadAttention(32, 4, **kwargs))
    default = inspect.signature(getattr(nn, kind)).parameters[argument].default
    make(**{argument: default})
    with pytest.raises(NotImplementedError, match=f"qshard.nn.{kind}: {argument}="):
        make(**{argument: REFUSED[argument]})


@pytest.mark.parametrize("kind", MODULES)
def test_refusals_of_forward_and_of_parallelism(kind):
    module = MODULES[kind](sequence_parallel=True)  # over one rank: nothing
    if kind != "LayerNormMLP":
        for argument in ("fp8_output", "fp8_grad"):
            with pytest.raises(NotImplementedError, match=argument):
                module(input_of(3, 32), **{argument: True})
        with pytest.raises(ValueError, match="parallel_mode='both' is none of"):
            MODULES[kind](parallel_mode="both")
        MODULES[kind](parallel_mode="column")
    module.set_tensor_parallel_group(None)
    module.set_device_mesh(None, None)
    module.set_context_parallel_group(None, [], None)


def test_wrong_choices_are_named():
    for make, error in (
        (lambda: nn.LayerNormLinear(8, 8, normalization="Group"), "normalization='Group' is none of"),
        (lambda: nn.LayerNormMLP(8, 8, normalization="Group"), "normalization='Group' is none of"),
        (lambda: nn.LayerNormMLP(8, 8, activation="tanh"), "activation='tanh' is none of"),
        (lambda: nn.LayerNormMLP(8, 8, activation_params={"limit": 1}), "'gelu' takes none"),
        (lambda: nn.LayerNormMLP(8, 8, activation="clamped_swiglu", activation_params={"beta": 1}),
         "activation_params has beta"),
    ):
        with pytest.raises(ValueError, match=error):
            make()
    with pytest.raises(NotImplementedError, match="parallel_mode='row'"):
        nn.LayerNormLinear(8, 8, parallel_mode="row")
