"""Weights that stay plain and are quantized at each use compute what quantized parameters with masters
compute, bit for bit."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from dist_helpers import device, on_ranks
from flat_ranges import own_amaxes
from helpers import fit, ops
from models.blocks import Model
from models.formats import DELAYED, FORMATS, MIXES, RECIPES, quantize_model
from models.fsdp2 import shard
from models.training import adamw, batch, train
from models.weights import different, local_values
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import qshard
from qshard.module_state import dynamic_of, dynamics_of

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Mlp(nn.Module):
    def __init__(self, format, recompute=None):
        super().__init__()
        self.up = nn.Linear(100, fit(format, 257))
        self.down = nn.Linear(self.up.out_features, 32, bias=False)
        self.recompute = recompute

    def forward(self, x):
        if self.recompute is None:
            return self.mlp(x)
        return checkpoint(self.mlp, x, use_reentrant=self.recompute)

    def mlp(self, x):
        return self.down(F.gelu(self.up(x)))


def pair(format, dtype=torch.float32, at="cpu", make=Mlp, **kwargs):
    """A model with quantized parameters, and one that quantizes them at each use."""
    torch.manual_seed(0)
    model = make(format).to(at, dtype)
    twin = copy.deepcopy(model)
    recipe = RECIPES.get(format) or next(r for r in EXTRA if r.format == format)
    kwargs.setdefault("filter_fn", lambda module, name: True)  # tied heads, too
    quantized = qshard.quantize_(model, recipe, **kwargs)
    return quantized, qshard.quantize_(twin, recipe, weights="dynamic", **kwargs)


EXTRA = (
    qshard.Float8BlockScaling(use_f32_scales=True),
    qshard.Float8CurrentScaling(use_power_2_scales=False),
)


def inputs(step, dtype=torch.float32, at="cpu"):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(3, 5, 100, generator=generator).to(at, dtype).requires_grad_()


def steps(model, optimizer, count=4, first=0, microbatches=1, dtype=torch.float32, at="cpu"):
    seen = []
    for step in range(first, first + count):
        for microbatch in range(microbatches):
            x = inputs(10 * step + microbatch, dtype, at)
            loss = model(x).float().square().mean()
            loss.backward()
            seen += [loss.item(), x.grad.clone()]
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [p.detach() * 1 for p in model.parameters()]


def same(seen, others):
    return [
        i
        for i, (a, b) in enumerate(zip(seen, others, strict=True))
        if not (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)
    ]


@pytest.mark.pairwise
@pytest.mark.parametrize("at", DEVICES)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("recompute", [None, False, True])
@pytest.mark.parametrize("weight_only", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", [*FORMATS, *(r.format for r in EXTRA)])
def test_trains_as_quantized_parameters(format, dtype, weight_only, recompute, microbatches, at):
    make = lambda format: Mlp(format, recompute)  # noqa: E731
    quantized, plain = pair(format, dtype, at, make, weight_only=weight_only)
    kwargs = dict(microbatches=microbatches, dtype=dtype, at=at)
    a, b = (steps(m, adamw(m), **kwargs) for m in (quantized, plain))
    assert not same(a, b)
    assert not any(map(qshard.is_quantized, plain.parameters()))
    assert type(plain.up) is qshard.nn.Linear


def saved_bytes(function):
    """Bytes of what autograd saves that no parameter is."""
    saved = {}

    def pack(tensor):
        saved[tensor.data_ptr() if not ops.is_quantized(tensor) else id(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return saved.values()


def quantizations(function):
    names = ("qshard::quantize", "qshard::_quantize_for_uses")
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        function()
    return sum(e.count for e in profiler.key_averages() if e.key in names)


@pytest.mark.parametrize("format", FORMATS)
def test_saves_the_plain_weight_and_no_codes(format):
    _, plain = pair(format)
    x = inputs(0)
    saved = list(saved_bytes(lambda: plain(x)))
    assert not any(ops.is_quantized(t) for t in saved)
    weights = {plain.up.weight.data_ptr(), plain.down.weight.data_ptr()}
    assert weights <= {t.data_ptr() for t in saved}


class Tied(nn.Module):
    def __init__(self, format):
        super().__init__()
        self.embedding = nn.Embedding(fit(format, 64), 100, padding_idx=3)
        self.head = nn.Linear(100, self.embedding.num_embeddings, bias=False)
        self.again = nn.Linear(100, self.embedding.num_embeddings)
        self.head.weight = self.again.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x) + self.again(x)


@pytest.mark.parametrize("format", FORMATS)
def test_tied_weights_are_quantized_once(format):
    quantized, plain = pair(format, make=Tied)
    tokens = torch.arange(24).view(4, 6)
    optimizers = [adamw(m) for m in (quantized, plain)]
    for _ in range(3):
        losses = []
        for model, optimizer in zip((quantized, plain), optimizers):
            loss = model(tokens).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        assert losses[0] == losses[1]
    # Gradients of the three uses are added in another order.
    values, others = quantized.head.weight.detach() * 1, plain.head.weight.detach()
    assert (values - others).abs().max() <= 4 * torch.finfo(torch.float32).eps * values.abs().max()

    def use():
        plain(tokens).square().mean().backward()

    assert quantizations(use) == 1
    assert dynamic_of(plain.head)._shared is None  # no codes are kept
    plain.embedding(tokens)
    plain.head.weight.data.mul_(2)
    with torch.no_grad():
        plain.head.weight.mul_(2)
        plain(tokens)  # of what was written since


def test_a_filter_cannot_part_tied_weights():
    make = lambda format: Tied(format)  # noqa: E731
    kwargs = dict(filter_fn=lambda _, name: name == "again")
    quantized, plain = pair("float8_blockwise", make=make, **kwargs)
    tokens = torch.arange(24)
    assert torch.equal(quantized(tokens), plain(tokens))
    assert dynamic_of(plain.head) is dynamic_of(plain.again) is dynamic_of(plain.embedding)


@pytest.mark.parametrize("make", [Mlp, Tied])
@pytest.mark.parametrize("format", ["float8_blockwise", DELAYED])
def test_inference_mode_gives_the_same_outputs(format, make):
    with torch.inference_mode():
        quantized, plain = pair(format, make=make)
        x = torch.arange(24) if make is Tied else inputs(0)
        assert torch.equal(quantized(x), plain(x))


# ---------------------------------------------------------------------------- delayed scaling


def states(model):
    return {n: t.clone() for n, t in model.state_dict().items() if "amax" in n}


def same_states(model, other):
    a, b = states(model), states(other)
    assert a.keys() == b.keys() and a
    return all(torch.equal(a[name], b[name]) for name in a)


def test_histories_are_those_of_quantized_parameters():
    quantized, plain = pair(DELAYED)
    optimizers = [adamw(m) for m in (quantized, plain)]
    for step in range(5):
        for model, optimizer in zip((quantized, plain), optimizers):
            steps(model, optimizer, 1, first=step)
        assert same_states(quantized, plain), step
    for model in (quantized, plain):
        with torch.no_grad():
            model.up.weight.mul_(8)  # a user's write: scales of its own
    x = inputs(99)
    assert torch.equal(quantized(x), plain(x))
    assert same_states(quantized, plain)


def resumed(model, way):
    if way == "deepcopy":
        return copy.deepcopy(model)
    if way == "pickle":
        return pickle.loads(pickle.dumps(model))
    other = qshard.quantize_(Mlp(DELAYED), RECIPES[DELAYED], weights="dynamic")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True), assign=way == "assign")
    return other


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "load", "assign"])
def test_training_goes_on_bit_for_bit(way):
    _, model = pair(DELAYED)
    optimizer = adamw(model)
    steps(model, optimizer, 3)
    other = resumed(model, way)
    other_optimizer = adamw(other)
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not same(steps(model, optimizer, 3, first=3), steps(other, other_optimizer, 3, first=3))
    assert same_states(model, other)
    assert not any("amax" in name for name, _ in model.named_buffers())


def test_checkpoints_go_both_ways():
    quantized, plain = pair(DELAYED)
    steps(quantized, adamw(quantized), 2)
    plain.load_state_dict(quantized.state_dict())
    x = inputs(5)
    assert torch.equal(quantized(x), plain(x)) and same_states(quantized, plain)
    steps(plain, adamw(plain), 2)
    quantized.load_state_dict(plain.state_dict())
    assert torch.equal(quantized(x), plain(x)) and same_states(quantized, plain)
    plain.load_state_dict(Mlp(DELAYED).state_dict())  # of a model without histories


def test_state_stays_float32_where_weights_go_elsewhere():
    _, plain = pair(DELAYED)
    plain.to(torch.bfloat16)(inputs(0, torch.bfloat16)).sum().backward()
    assert all(t.dtype == torch.float32 for t in dynamic_of(plain.up).state)


# -------------------------------------------------------------------------------- wrappers


def run_ddp(format, when):
    models = []
    for weights in ("quantized", "dynamic"):
        torch.manual_seed(0)
        model = Model(format=format).to(device())
        if weights == "dynamic" and when == "after":
            model = quantize_model(DistributedDataParallel(model), format, weights=weights)
        else:
            model = DistributedDataParallel(quantize_model(model, format, weights=weights))
        models.append(model)
    losses = [train(model) for model in models]
    assert losses[0] == losses[1]
    assert not different(local_values(models[0]), local_values(models[1]))


@pytest.mark.parametrize("format", MIXES)
@on_ranks(2, devices=("cpu",))
def test_dynamic_weights_train_alike_under_ddp(format):
    run_ddp(format, "before")


@pytest.mark.parametrize("format", ["float8_tensorwise", "float8_blockwise", "nvfp4"])
@on_ranks(2, devices=("cuda",))
def test_ddp_on_gpus(format):
    """Not of delayed scaling: DDP broadcasts the histories of dynamic weights, which are plain buffers,
    and activations are scaled by them."""
    run_ddp(format, "before")


@on_ranks(2, devices=("cpu",))
def test_quantized_after_ddp():
    run_ddp("float8_blockwise", "after")


@pytest.mark.parametrize("format", ["float8_tensorwise", "float8_blockwise", "nvfp4"])
@on_ranks(2, devices=("cpu",))
def test_zero_redundancy_optimizer(format):
    """With buckets of its own, too, which quantized parameters cannot be views of."""
    losses, values = [], []
    for weights in ("quantized", "dynamic"):
        torch.manual_seed(0)
        model = quantize_model(Model(format=format).to(device()), format, weights=weights)
        model = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=1e-2, parameters_as_bucket_view=weights == "dynamic"
        )
        losses.append(train(model, optimizer))
        values.append(local_values(model))
    assert losses[0] == losses[1]
    assert not different(*values)


def run_fsdp2():
    losses, values = [], []
    for weights in ("quantized", "dynamic"):
        torch.manual_seed(0)
        model = quantize_model(Model().to(device()), "float8_blockwise", weights=weights)
        model = shard(model)
        losses.append(train(model))
        values.append(local_values(model))
    assert losses[0] == losses[1] and not different(*values)
    torch.manual_seed(0)
    model = shard(quantize_model(Model().to(device()), DELAYED, weights="dynamic"))
    try:
        model(batch(0))
    except RuntimeError as error:
        return str(error)


@on_ranks(2)
def test_fully_shard_takes_dynamic_weights_but_delayed_ones():
    error = run_fsdp2()
    assert "weights that FSDP shards need the amaxes of all ranks" in error
    assert 'without weights="dynamic"' in error


@on_ranks(2)
def test_histories_agree_over_the_group():
    torch.manual_seed(0)
    model = quantize_model(
        Model().to(device()), DELAYED, weights="dynamic", group=dist.group.WORLD
    )
    model = DistributedDataParallel(model)
    train(model)
    tables = [dynamic.state[0] for _, dynamic in dynamics_of(model)]
    mine = torch.cat([t.flatten() for t in tables])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    agree, filled = torch.equal(*both), [int((t[1:, 1:] > 0).sum()) for t in tables]
    assert agree and filled == [4] * 5  # input and gradient, of the two steps that are kept


# --------------------------------------------------------------------------------- refused


def linear(**kwargs):
    return nn.Sequential(nn.Linear(32, 32, **kwargs))


@pytest.mark.parametrize(
    "kwargs,message",
    [
        (dict(weights="dynamic", stochastic_rounding=True, keep_master=False), "stochastic_rounding wi"),
        (dict(weights="dynamic", keep_master=False), "are their own masters; leave one of the two out"),
        (dict(weights="dynamic", persistent_state=False), "histories are in the model's state_dict"),
        (dict(weights="dynamic", tp_mesh="mesh"), "leave one of the two out"),
        (dict(weights="plain"), 'weights is "quantized" or "dynamic", got \'plain\''),
        (dict(group="g"), 'group is for weights="dynamic"'),
    ],
)
def test_arguments_that_do_not_fit(kwargs, message):
    model = linear()
    with pytest.raises(ValueError, match=message):
        qshard.quantize_(model, RECIPES["float8_blockwise"], **kwargs)
    assert type(model[0]) is nn.Linear


def test_modules_that_do_not_fit():
    class Other(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    with pytest.raises(TypeError, match="it needs the forward of nn.Linear"):
        qshard.quantize_(nn.Sequential(Other(4, 4)), RECIPES["mxfp8"], weights="dynamic")
    with pytest.raises(TypeError, match="it needs the forward of nn.Linear, made by torch"):
        model = nn.Sequential(qshard.nn.Linear(32, 32))
        qshard.quantize_(model, RECIPES["mxfp8"], weights="dynamic")
    model = qshard.quantize_(linear(), RECIPES["mxfp8"])
    with pytest.raises(TypeError, match=r'call qshard.dequantize_\(model\) before weights="dynamic"'):
        qshard.quantize_(model, RECIPES["mxfp8"], weights="dynamic")
    with pytest.raises(ValueError, match="multiple of 32 rows"):
        recipe = qshard.MXFP8BlockScaling(weight_block=(1, 32))
        qshard.quantize_(nn.Sequential(nn.Linear(4, 4)), recipe, weights="dynamic")


def test_there_and_back():
    model = qshard.quantize_(linear(), RECIPES[DELAYED], weights="dynamic")
    qshard.quantize_(model, RECIPES["mxfp8"], weights="dynamic")
    assert model[0].weight_format == "mxfp8" and "0.weight_amax_history" not in model.state_dict()
    qshard.quantize_(model, RECIPES["mxfp8"])
    assert qshard.is_quantized(model[0].weight) and dynamic_of(model[0]) is None
    qshard.dequantize_(model)
    qshard.quantize_(model, RECIPES[DELAYED], weights="dynamic")
    qshard.dequantize_(model)
    assert type(model[0]) is nn.Linear and list(model.state_dict()) == ["0.weight", "0.bias"]


def test_operators_refuse_what_does_not_fit():
    x, w = torch.randn(2, 32), torch.randn(16, 32)
    with pytest.raises(ValueError, match="so format must name"):
        ops.linear(x, w, weight_state=[])
    with pytest.raises(ValueError, match="needs 2 state tensors, got 0"):
        ops.linear(x, w, format="float8_delayed", weight_state=[])
    with pytest.raises(ValueError, match="use nearest rounding"):
        ops.linear(x, w, format="nvfp4[stochastic]", weight_state=[])
    with pytest.raises(ValueError, match="run forward through the wrapper"):
        ops.linear(x, w.flatten(), format="nvfp4", weight_state=[])


@pytest.mark.parametrize("at", DEVICES)
@pytest.mark.parametrize("format", ["float8_tensorwise", "float8_blockwise"])
def test_amaxes_that_are_known_are_not_looked_for(format, at):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 200, generator=generator).to(at)
    w = torch.randn(130, 200, generator=generator).to(at)
    amax, = own_amaxes([w], [(format, *w.shape, 0)])
    results = []
    for state in [], [amax], [4 * amax]:
        weight = w.clone().requires_grad_()
        inputs = x.clone().requires_grad_()
        out = ops.linear(inputs, weight, format=format, weight_state=state)
        out.square().sum().backward()
        results.append((out, inputs.grad, weight.grad))
    for alone, known in zip(results[0], results[1]):
        assert torch.equal(alone, known)
    coarser = ops.dequantize(ops._quantize_for_uses(w, format, [2.0**20 * amax]))
    assert not torch.equal(coarser, ops.dequantize(ops.quantize(w, format)))
    with pytest.raises(ValueError, match="is scaled by"):
        ops.linear(x, w, format="float8_blockwise", weight_state=[torch.ones(3, device=at)])
    with pytest.raises(ValueError, match="needs no state tensors, got 1"):
        ops.linear(x, w, format="nvfp4", weight_state=[amax])
