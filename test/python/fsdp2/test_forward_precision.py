"""qshard.set_forward_precision: forward multiplies masters in bf16, backward codes, from the next step on."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dist_helpers import device, error_of, full_mesh, gather_objects, on_ranks
from models.blocks import Model
from models.training import adamw, batch, train
from nn_helpers import output_and_gradients
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard

import qshard
from qshard.nn.swiglu import swiglu_of_linears

ops = torch.ops.qshard
NVFP4 = qshard.NVFP4BlockScaling(emulate=True)
RECIPES = (
    NVFP4,
    qshard.NVFP4BlockScaling(disable_2d_quantization=True, four_over_six=True, emulate=True),
    qshard.MXFP8BlockScaling(emulate=True),
    qshard.Float8BlockScaling(emulate=True),
)
by_format = {"ids": lambda recipe: recipe.format}
in_bf16 = qshard.set_forward_precision


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 32))


def product(x, linear):
    """What forward is to be."""
    parts = [t.to(torch.bfloat16) for t in (x, linear.weight.detach(), linear.bias.detach())]
    return F.linear(*parts).to(x.dtype)


def gradients(linear, x, grad):
    x = x.clone().requires_grad_()
    linear.zero_grad()
    torch.manual_seed(3)
    linear(x).backward(grad)
    return [x.grad, linear.weight.grad, linear.bias.grad]


# ---------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("recipe", RECIPES, **by_format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_multiplies_masters_and_backward_codes(recipe, dtype):
    linear = qshard.quantize_(mlp(), recipe)[0]
    quantized = copy.deepcopy(linear)
    assert in_bf16(linear, "bf16") is linear and "forward in bf16" in str(linear)
    x, grad = torch.randn(3, 20, 48).to(dtype), torch.randn(3, 20, 64).to(dtype)
    assert torch.equal(linear(x), product(x, linear)) and not torch.equal(linear(x), quantized(x))
    for mine, theirs in zip(gradients(linear, x, grad), gradients(quantized, x, grad)):
        assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype


def test_parameters_optimizer_and_checkpoints_go_on():
    model = qshard.quantize_(mlp(), NVFP4)
    before, optimizer = list(model.parameters()), torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.randn(20, 48)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    in_bf16(model, "bf16")
    in_bf16(model, "bf16")  # again changes nothing
    assert all(a is b and type(b) is nn.Parameter for a, b in zip(before, model.parameters(), strict=True))
    assert not any(map(qshard.is_quantized, model.parameters()))
    assert all(torch.equal(value, saved[name] + 0) for name, value in model.state_dict().items())
    moments = [optimizer.state[p]["exp_avg"] for p in before]
    model(torch.randn(20, 48)).square().mean().backward()
    optimizer.step()
    assert all(optimizer.state[p]["exp_avg"] is m and optimizer.state[p]["step"] == 3 for p, m in zip(before, moments))
    assert type(qshard.dequantize_(model)[0]) is nn.Linear


def test_compiled_code_has_the_bits_of_eager():
    model = in_bf16(qshard.quantize_(mlp(), NVFP4), "bf16")
    x = torch.randn(20, 48)

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, *(output_and_gradients(model, run, x) for run in (compiled, model))))


def test_autocast_weights_that_stay_plain_and_tied_ones():
    x = torch.randn(20, 48)
    plain = in_bf16(qshard.quantize_(mlp(), NVFP4, weights="dynamic"), "bf16")
    assert torch.equal(plain[0](x), product(x, plain[0]))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            y = plain[0](x)
        assert y.dtype == dtype and torch.equal(y, product(x.to(dtype), plain[0]))
    tied = nn.ModuleDict({"embedding": nn.Embedding(64, 32), "head": nn.Linear(32, 64)})
    tied["head"].weight = tied["embedding"].weight
    in_bf16(qshard.quantize_(tied, NVFP4, filter_fn=lambda *_: True), "bf16")
    looked_up = tied["embedding"](torch.arange(5))
    assert torch.equal(looked_up, tied["embedding"].weight[:5])
    assert torch.equal(tied["head"](looked_up), product(looked_up, tied["head"]))


def test_an_mlp_that_would_run_on_codes_runs_step_by_step():
    gate, up, down = linears = [nn.Linear(48, 64), nn.Linear(48, 64), nn.Linear(64, 48)]
    qshard.quantize_(nn.ModuleList(linears), NVFP4)
    x = torch.randn(20, 48)
    assert swiglu_of_linears(x, gate, up, down) is not None
    in_bf16(nn.ModuleList(linears), "bf16")
    assert swiglu_of_linears(x, gate, up, down) is None


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: mlp(), ValueError, "the model has no quantized weights"),
        (lambda: qshard.quantize_(mlp(), NVFP4, keep_master=False), ValueError, "the weight of 0 has no master"),
        (lambda: qshard.quantize_(mlp(), qshard.DelayedScaling()), NotImplementedError, "float8_delayed"),
        (lambda: qshard.quantize_(nn.Sequential(nn.Linear(48, 64), qshard.nn.LayerNormLinear(64, 32)), NVFP4),
         NotImplementedError, "1 is a LayerNormLinear.*save a checkpoint"),
    ],
)  # fmt: skip
def test_what_is_refused_changes_nothing(make, error, words):
    model = make()
    before = [qshard.is_quantized(p) for p in model.parameters()]
    with pytest.raises(error, match="^qshard.set_forward_precision: .*" + words):
        in_bf16(model, "bf16")
    assert before == [qshard.is_quantized(p) for p in model.parameters()]


def test_other_precisions_and_living_graphs_are_refused():
    model = qshard.quantize_(mlp(), NVFP4)
    with pytest.raises(ValueError, match="precision is \"bf16\", got 'fp8'"):
        in_bf16(model, "fp8")
    y = model(torch.randn(20, 48))
    with pytest.raises(RuntimeError, match="set_forward_precision: 0.weight is in use by the graph"):
        in_bf16(model, "bf16")
    y.sum().backward()
    assert qshard.is_quantized(model[0].weight)


# ----------------------------------------------------------------------------------------- FSDP2


def shard(model, policy):
    for block in model.blocks:
        fully_shard(block, mesh=full_mesh(), mp_policy=policy)
    return fully_shard(model, mesh=full_mesh(), mp_policy=policy)


def build(recipe, policy, rows):
    torch.manual_seed(0)
    model = Model(rows).to(device())
    return shard(qshard.quantize_(model, recipe), policy)


@pytest.mark.parametrize("recipe", RECIPES[:3], **by_format)
@pytest.mark.parametrize("rows", [48, 3], ids=lambda rows: f"{rows}_rows")
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.each_value
@on_ranks(2, 4)
def test_under_fsdp2_it_goes_on_as_a_model_that_began_so(recipe, rows, param_dtype):
    """Which gathers plain weights from its first forward on; with three rows a rank of four has none."""
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    model = build(recipe, policy, rows)
    optimizer, sharded = adamw(model), list(model.parameters())
    train(model, optimizer, steps=2)
    with torch.no_grad():
        model(batch(9))  # leaves the root's weights gathered
    in_bf16(model, "bf16")
    assert all(a is b for a, b in zip(sharded, model.parameters(), strict=True))

    twin = build(recipe, policy, rows)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(twin, get_model_state_dict(model, options=options), options=options)
    in_bf16(twin, "bf16")
    twin_optimizer = adamw(twin)
    for mine, theirs in zip(model.parameters(), twin.parameters()):
        twin_optimizer.state[theirs] = copy.deepcopy(optimizer.state[mine])
    results = []
    for each, its_optimizer in ((model, optimizer), (twin, twin_optimizer)):
        torch.manual_seed(5)
        results.append(train(each, its_optimizer, steps=2, first_step=2))
    assert results[0] == results[1]
    for mine, theirs in zip(model.parameters(), twin.parameters()):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())
    whole = {name: p.full_tensor() for name, p in model.named_parameters()}
    plain = Model(rows).to(device())
    plain.load_state_dict(whole)
    x = torch.randn(4, 100, device=device()).to(param_dtype or torch.float32)
    model.unshard()
    y = model.head(x)
    assert torch.equal(y, F.linear(x.bfloat16(), plain.head.weight.bfloat16()).to(x.dtype))


@on_ranks(2)
def test_fsdp2_gathers_two_bytes_per_element():
    model = build(NVFP4, MixedPrecisionPolicy(param_dtype=torch.bfloat16), 48)
    train(model, steps=1)
    in_bf16(model, "bf16")
    train(model, steps=1)
    for module in model.blocks[0].up, model.blocks[0].down:
        param = next(p for g in [model.blocks[0]._get_fsdp_state()._fsdp_param_group] for p in g.fsdp_params
                     if p.sharded_param is module.weight)
        (gathered,) = param.all_gather_outputs
        assert gathered.dtype == torch.bfloat16
    assert sum(row.gathered for row in qshard.report(model)) > 0


@on_ranks(2)
def test_gradients_that_wait_are_not_lost():
    model = build(NVFP4, MixedPrecisionPolicy(), 48)
    model.set_requires_gradient_sync(False)
    model(batch(0)).sum().backward()
    errors = gather_objects(error_of(in_bf16, model, "bf16"))
    assert all("RuntimeError: qshard.set_forward_precision: gradients of" in e for e in errors)
    assert len(set(errors)) == 1 and all(map(qshard.is_quantized, (model.head.weight, model.blocks[1].up.weight)))
    model.set_requires_gradient_sync(True)
    model(batch(1)).sum().backward()
    in_bf16(model, "bf16")
    model(batch(2)).sum().backward()


@on_ranks(2)
def test_fsdp1_gathers_values_or_is_refused():
    x, mixed = torch.randn(8, 48, device=device()), MixedPrecision(param_dtype=torch.bfloat16)

    def wrapped(recipe):
        inner = qshard.quantize_(mlp().to(device()), recipe, weights="dynamic")
        whole = copy.deepcopy(inner[0])
        root = FullyShardedDataParallel(inner, mixed_precision=mixed, device_id=device())
        qshard.prepare_for_fsdp1(root)(x).sum().backward()
        return root, whole

    root, whole = wrapped(NVFP4)
    in_bf16(root, "bf16")
    kept = []
    root.module[0].register_forward_hook(lambda module, args, y: kept.extend([*args, y]))
    root(x).sum().backward()
    assert torch.equal(kept[1], product(kept[0], whole))
    error = error_of(in_bf16, wrapped(qshard.Float8BlockScaling(emulate=True))[0], "bf16")
    assert "NotImplementedError: qshard.set_forward_precision: FSDP1 gathers codes" in error


@on_ranks(2)
def test_ddp_is_refused_and_takes_weights_that_stay_plain():
    ddp = nn.parallel.DistributedDataParallel(qshard.quantize_(mlp().to(device()), NVFP4))
    assert "before DistributedDataParallel(model)" in error_of(in_bf16, ddp, "bf16")
    plain = qshard.quantize_(mlp().to(device()), NVFP4, weights="dynamic")
    ddp = nn.parallel.DistributedDataParallel(plain)
    x = torch.randn(8, 48, device=device())
    ddp(x).sum().backward()
    in_bf16(ddp, "bf16")
    assert torch.equal(plain[0](x), product(x, plain[0]))
    ddp(x).sum().backward()
    dist.barrier()
