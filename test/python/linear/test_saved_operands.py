"""What linears keep between forward and backward: never more than plain torch keeps, and of an operand that no
gradient reads nothing. And what hooks on saved tensors may hand back."""

import copy

import pytest
import torch
import torch.nn.functional as F
from dist_helpers import device as rank_device, on_ranks
from dist_helpers import full_mesh, on_ranks
from helpers import FORMATS, fit
from nn_helpers import RECIPES, assert_bits, on_devices, randomize
from torch.distributed.fsdp import fully_shard

import qshard
from qshard import nn
from qshard._runtime.classes import TensorState

BUDGET_S = 60  # compiles linears
ops = torch.ops.qshard
B16 = torch.bfloat16


def draw(*shape, seed=1, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def planes_of(parameter):
    """The tensors in whose memory a parameter lies."""
    if not qshard.is_quantized(parameter):
        return [parameter]
    planes = [getattr(ops, name)(parameter) for name in ("codes", "scale_inv", "master")]
    return [plane for plane in planes if plane is not None]


def kept_by(function, parameters):
    """Bytes that autograd keeps of what `function` ran, those of parameters left out, and how many of the
    parameters it keeps."""
    owners = {
        plane.untyped_storage().data_ptr(): i
        for i, parameter in enumerate(parameters)
        for plane in planes_of(parameter.detach())
    }
    kept, held = {}, set()

    def pack(tensor):
        if tensor.numel() > 0:
            memory = tensor if qshard.is_quantized(tensor) else tensor.untyped_storage()
            if qshard.is_quantized(tensor) or memory.data_ptr() in owners:
                held.add(id(tensor) if qshard.is_quantized(tensor) else owners[memory.data_ptr()])
            else:
                kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function()
    return sum(kept.values()), len(held), output


class Plain(torch.nn.Module):
    """The layers below, as plain torch writes them."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        linear = torch.nn.Linear
        if kind == "linear":
            self.first = linear(64, 96)
        else:
            self.norm = torch.nn.LayerNorm(64)
            self.first = linear(64, 2 * 96 if kind == "mlp" else 96)
        if kind == "mlp":
            self.second = linear(96, 64)

    def forward(self, x):
        if self.kind == "linear":
            return self.first(x)
        inner = self.first(self.norm(x))
        if self.kind == "mlp":
            gate, up = inner.chunk(2, -1)
            return self.second(F.silu(gate) * up)
        return inner


def module_of(kind, dtype, device):
    options = {"params_dtype": dtype, "device": device}
    if kind == "linear":
        return nn.Linear(64, 96, **options)
    if kind == "norm linear":
        return nn.LayerNormLinear(64, 96, **options)
    return nn.LayerNormMLP(64, 96, activation="swiglu", **options)


def names(kind, plain):
    """(of the normalization, of the first linear, of the second)."""
    if plain:
        return "norm.", "first.", "second."
    if kind == "linear":
        return "-", "", "-"
    return "layer_norm_", "weight bias fc1_", "fc2_"


def train_only(module, kind, trained, plain):
    """Parameters of the parts in `trained` alone have gradients."""
    parts = dict(zip(("norm", "first", "second"), names(kind, plain)))
    for name, parameter in module.named_parameters():
        part = next(
            part
            for part, prefixes in parts.items()
            if any(name.startswith(prefix) for prefix in prefixes.split() or [""])
        )
        parameter.requires_grad_(part in trained)


@on_devices
@pytest.mark.pairwise
@pytest.mark.parametrize("kind", ["linear", "norm linear", "mlp"])
@pytest.mark.parametrize("trained", ["", "norm", "first", "second", "norm first second", "norm second"])
@pytest.mark.parametrize("needs_x", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, B16])
@pytest.mark.parametrize("weights", ["quantized", "weight only", "dynamic"])
@pytest.mark.parametrize("format", [*FORMATS])
@pytest.mark.only_where(lambda kind, weights: kind == "linear" or weights != "dynamic")
def test_modules_keep_no_more_than_plain_torch(device, kind, trained, needs_x, dtype, weights, format):
    plain = Plain(kind).to(device, dtype)
    module = randomize(module_of(kind, dtype, device))
    if weights == "dynamic":
        module = torch.nn.Linear(64, 96, dtype=dtype, device=device)
        module = qshard.quantize_(torch.nn.Sequential(module), RECIPES[format], weights="dynamic")[0]
    else:
        keywords = {"weight_only": weights == "weight only"}
        qshard.quantize_(module, RECIPES[format], filter_fn=lambda *_: True, **keywords)
    for layer in (plain, module):
        train_only(layer, kind, trained, layer is plain)
    x = draw(128, 64, dtype=dtype, device=device).requires_grad_(needs_x)
    own, own_weights, y = kept_by(lambda: module(x), list(module.parameters()))
    expected, held, _ = kept_by(lambda: plain(x), list(plain.parameters()))
    assert own <= expected and own_weights <= held
    if kind != "mlp" and (not needs_x or not trained):
        assert own == expected or device == "cuda"  # where codes are smaller
    if y.requires_grad:
        y.square().sum().backward()
    for name, parameter in module.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name


@on_devices
@pytest.mark.parametrize("format", FORMATS)
def test_operators_keep_no_more_than_plain_torch(device, format):
    """Every choice of tensors with a gradient."""
    gamma, x = draw(64, seed=2, device=device), draw(128, 64, device=device)
    drawn = [draw(fit(format, rows), cols, seed=rows, device=device) for rows, cols in ((96, 64), (96, 64), (64, 96))]

    def plain(gamma, gate, up, down, x):
        normed = F.rms_norm(x, (64,), gamma, 1e-5)
        return F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)

    def own(gamma, gate, up, down, x):
        norm = {"norm_weight": gamma, "eps": 1e-5, "rms": True}
        return ops.swiglu_mlp(x, gate, up, down, format=format, down_format=format, **norm)

    for trained in range(32):
        bytes = []
        for function in (own, plain):
            weights = [ops.quantize(w, format) if function is own else w.clone() for w in drawn]
            given = [gamma.clone(), *weights, x.clone()]
            for i, tensor in enumerate(given):
                tensor.requires_grad_(bool(trained >> i & 1))
            bytes.append(kept_by(lambda: function(*given), given)[:2])  # noqa: B023
        assert bytes[0] <= bytes[1] and bytes[0][1] <= bytes[1][1], f"{trained:05b}"


@on_devices
@pytest.mark.parametrize("format", ["float8_tensorwise", "float8_blockwise", "mxfp8"])
@pytest.mark.parametrize("trained", ["x", "weight", "x weight"])
def test_compiled_linears_keep_no_more_than_plain_torch(device, format, trained):
    torch._dynamo.reset()
    bytes, results = [], []
    for recipe in (RECIPES[format], None):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 96, bias=False, dtype=B16, device=device))
        if recipe is not None:
            qshard.quantize_(model, recipe)
        model.requires_grad_("weight" in trained)
        x = draw(128, 64, dtype=B16, device=device).requires_grad_("x" in trained)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(x)
        kept, held, y = kept_by(lambda: compiled(x), list(model.parameters()))  # noqa: B023
        bytes.append((kept, held))
        y.square().sum().backward()
        results.append([tensor.grad for tensor in (x, *model.parameters())])
    assert bytes[0] <= bytes[1] and bytes[0][1] <= bytes[1][1]
    for actual, expected in zip(*results):
        assert (actual is None) == (expected is None)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("weights", ["quantized", "weight only", "dynamic"])
@pytest.mark.parametrize("format", ["float8_tensorwise", "float8_delayed", "float8_blockwise", "mxfp8_1x32", "nvfp4"])
# The state of delayed scaling moves, and compiled code keeps it as it keeps any tensor.
@pytest.mark.only_where(lambda format, compiled: not compiled or format != "float8_delayed")
def test_two_losses_of_a_linear_probe(format, weights, compiled):
    """Nothing of the weight is kept where its input has no gradient, so a step between the two is no error."""
    torch._dynamo.reset()
    keywords = {"weights": "dynamic"} if weights == "dynamic" else {"weight_only": weights == "weight only"}
    probe = qshard.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 96)), RECIPES[format], **keywords)
    run = torch.compile(probe, backend="aot_eager") if compiled else probe
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
    x = draw(32, 64)
    first, second = run(x).square().mean(), run(x).abs().mean()
    first.backward()
    optimizer.step()
    second.backward()
    assert probe[0].weight.grad.shape == (96, 64)


@pytest.mark.parametrize("format", FORMATS)
def test_gradient_of_a_weight_that_was_not_kept(format):
    """The bits of one whose weight was."""
    results = []
    for needs_x in (False, True):
        weight = torch.nn.Parameter(ops.quantize(draw(fit(format, 96), 64, seed=2), format))
        x = draw(33, 64).requires_grad_(needs_x)
        for seed in (3, 4):  # the second adds to .grad
            y = F.linear(x, weight)
            y.backward(draw(*y.shape, seed=seed))
        state = TensorState(weight.detach()).scaling_state()
        results.append([weight.grad, *(state[name] for name in sorted(state))])
    assert_bits(*results)


@pytest.mark.parametrize("format", ["float8_delayed", "float8_blockwise", "nvfp4"])
def test_gradient_of_one_matrix_of_several(format):
    results = []
    for needs_x in (False, True):
        experts = torch.nn.Parameter(ops.quantize(draw(3, 32, 64, seed=2), format))
        x = draw(33, 64).requires_grad_(needs_x)
        y = F.linear(x, experts[1])
        y.backward(draw(*y.shape, seed=3))
        state = TensorState(experts.detach()).scaling_state()
        results.append([experts.grad, *(state[name] for name in sorted(state))])
    assert_bits(*results)


def test_transforms_keep_no_input_of_a_frozen_weight():
    """A frozen weight of torch.func keeps no input."""
    layer = qshard.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 96)), RECIPES["float8_blockwise"])[0]
    layer.requires_grad_(False)
    x = draw(8, 64)
    grad = torch.func.grad(lambda t: layer(t).square().sum())(x)
    given = x.clone().requires_grad_()
    layer(given).square().sum().backward()
    torch.testing.assert_close(grad, given.grad)


# ------------------------------------------------------------------------ hooks that return values


def offloading():
    """save_on_cpu(pin_memory=True) where there is no accelerator to pin memory for; and what it was given."""
    given = []

    def pack(tensor):
        given.append(tensor)
        copied = torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout)
        copied.copy_(tensor)
        return tensor.device, copied

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[1].to(packed[0]))
    return hooks, given


@on_devices
@pytest.mark.parametrize("keep_master", [False, True])
@pytest.mark.parametrize("format", [*FORMATS, "stochastic"])
# Only weights without a master are rounded stochastically.
@pytest.mark.only_where(lambda format, keep_master: format != "stochastic" or not keep_master)
def test_hooks_that_hand_values_back(device, format, keep_master):
    """The bits of backward without hooks; weights go by one byte per element."""

    recipe = RECIPES.get(format, RECIPES["float8_blockwise"])

    def run(offloads):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            nn.LayerNormMLP(64, 96, activation="swiglu", normalization="RMSNorm", device=device),
            torch.nn.Linear(64, 96, device=device),
        )
        randomize(model)
        options = {"keep_master": keep_master, "stochastic_rounding": format == "stochastic"}
        qshard.quantize_(model, recipe, filter_fn=lambda *_: True, **options)
        if format == "stochastic":  # codes that do not follow from the values
            torch.optim.SGD(model.parameters(), lr=0.0).step()
        x = draw(32, 64, device=device).requires_grad_()
        hooks, given = offloading()
        if offloads:
            with hooks:
                y = model(x)
        else:
            y = model(x)
        y.backward(draw(*y.shape, seed=3, device=device))
        results = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
        weights = [p.detach() for p in model.parameters() if qshard.is_quantized(p)]
        state = [t for weight in weights for t in TensorState(weight).scaling_state().values()]
        return results + state, given

    results, given = run(True)
    assert_bits(results, run(False)[0])
    assert given and not any(qshard.is_quantized(tensor) for tensor in given)


@on_devices
@pytest.mark.parametrize("wrap", ["save_on_cpu", "offload_wrapper"])
def test_offloading_of_torch(device, wrap):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

    if device == "cpu" and not torch.cuda.is_available() and wrap == "offload_wrapper":
        pytest.skip("needs a GPU: it pins memory")
    model = qshard.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 96)).to(device), RECIPES["float8_blockwise"])
    wrapped = offload_wrapper(copy.deepcopy(model)) if wrap == "offload_wrapper" else model
    results = []
    for module in (model, wrapped):
        x = draw(8, 64, device=device).requires_grad_()
        pins = torch.cuda.is_available()
        with torch.autograd.graph.save_on_cpu(pin_memory=pins):
            y = module(x)
        y.sum().backward()
        results.append(x.grad)
    assert_bits(*results)


@pytest.mark.parametrize("format", ["float8_delayed", "float8_blockwise", "nvfp4", "mxfp8"])
def test_a_window_goes_without_its_buffer(format):
    """Hooks are handed the own rows of one matrix of several, and no others."""
    results = []
    for offloads in (False, True):
        experts = torch.nn.Parameter(ops.quantize(draw(4, 32, 64, seed=2), format))
        x = draw(5, 64).requires_grad_()
        hooks, given = offloading()
        if offloads:
            with hooks:
                y = F.linear(x, experts[2])
            assert max(t.numel() for t in given if t.dtype == torch.uint8) <= 32 * 80
        else:
            y = F.linear(x, experts[2])
        y.sum().backward()
        results.append([x.grad, experts.grad])
    assert_bits(*results)


def test_checkpointing_recomputes_what_it_kept():
    layer = qshard.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 96)), RECIPES["float8_blockwise"])
    results = []
    for recomputes in (False, True):
        x = draw(8, 64).requires_grad_()
        hooks, _ = offloading()
        with hooks:
            y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if recomputes else layer(x)
        y.sum().backward()
        results.append(x.grad)
    assert_bits(*results)


@on_ranks(2)
def test_hooks_under_fsdp2():
    """Gradients under FSDP2, which frees what was gathered after forward: without hooks, and with each kind."""
    formats = ("float8_delayed", "float8_blockwise", "mxfp8_1x32")
    right = {}
    for format in formats:
        for reshards in (True, False):
            results = []
            for way in ("no hooks", "identity", "copies", "checkpoint"):
                device = rank_device()
                torch.manual_seed(0)
                model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64)) for _ in range(3)])
                qshard.quantize_(model.to(device), RECIPES[format])
                for block in (*model, model):
                    fully_shard(block, mesh=full_mesh(), reshard_after_forward=reshards)
                x = draw(8, 64, device=device).requires_grad_()
                if way == "checkpoint":
                    y = x
                    for block in model:
                        y = torch.utils.checkpoint.checkpoint(block, y, use_reentrant=False)
                elif way == "no hooks":
                    y = model(x)
                else:
                    same = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
                    with same if way == "identity" else offloading()[0]:
                        y = model(x)
                y.square().sum().backward()
                results.append([x.grad, *(p.grad.to_local() for p in model.parameters())])
                right[format, reshards, way] = all(map(torch.equal, results[0], results[-1]))
    assert len(right) == 24 and all(right.values()), right


@pytest.mark.parametrize("format", FORMATS)
def test_compiled_code_takes_values_whose_codes_follow(format):
    torch._dynamo.reset()
    layer = qshard.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 96)), RECIPES[format], keep_master=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    expected, x = draw(8, 64).requires_grad_(), draw(8, 64).requires_grad_()
    layer(expected).sum().backward()
    hooks, _ = offloading()
    with hooks:
        y = compiled(x)
    if format in ("float8_delayed", "mxfp8_1x32"):
        with pytest.raises(RuntimeError, match="a hook on saved tensors made plain values"):
            y.sum().backward()
        return
    y.sum().backward()
    assert_bits(x.grad, expected.grad)


def test_a_hook_that_hands_back_something_else_is_named():
    weight = torch.nn.Parameter(ops.quantize(draw(96, 64), "float8_blockwise"))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t[:1]):
        y = F.linear(draw(8, 64).requires_grad_(), weight)
    with pytest.raises(RuntimeError, match=r"a hook on saved tensors was given a weight's codes, .*\[96, 64\]"):
        y.sum().backward()
