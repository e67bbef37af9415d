"""Gradients in few bits under FSDP2: bits of the oracle, wire bytes, and what goes on as before."""

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from collective_calls import collectives
from dist_helpers import device, full_mesh, on_ranks
from models.blocks import WIDTH, Model
from models.formats import RECIPES, quantize_model
from models.fsdp2 import build, shard
from models.training import REDUCTION_ERROR as ERROR, batch, gradients, loss_of, relative_error
from models.weights import local
from reference import gradient_message
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module, style as torch_styles
from torch.nn.parallel import DistributedDataParallel

import qshard
from qshard import tensor_parallel
from qshard.gradients import QuantizedReduceScatter
from qshard.model.quantize import quantize_like
from qshard.modules import parameter_swap

BUDGET_S = 60
FORMATS = tuple(gradient_message.FORMATS)
AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM


def plain_model(rows=257, **kwargs):
    torch.manual_seed(0)
    return shard(Model(rows).to(device()), **kwargs)


def backward(model, step=0, dtype=torch.float32):
    loss_of(model, batch(step, dtype=dtype)).backward()


# --------------------------------------------------------------------------- bits of the reduction


def run_bits(fmt, dtype, n, op_name):
    rank, world = dist.get_rank(), dist.get_world_size()
    factor = {"sum": 1.0, "avg": 1 / world, "premul": 0.3}[op_name]
    op = {"sum": SUM, "avg": AVG}.get(op_name) or dist._make_nccl_premul_sum(0.3)
    inputs = []
    for r in range(world):
        generator = torch.Generator().manual_seed(r)
        x = torch.randn(world * n, generator=generator) * torch.rand(world * n, generator=generator) ** 8
        x[::97] = 0
        inputs.append(x.to(dtype))
    if n > 600:
        inputs[-1][500] = float("inf")
    mine = [x.view(world, n)[rank] for x in inputs]
    out = torch.empty(n, dtype=dtype, device=device())
    reduce = QuantizedReduceScatter(fmt)
    with collectives() as calls:
        assert reduce(out, inputs[rank].clone().to(device()), dist.group.WORLD, op) is None
    messages = [gradient_message.encode(x, fmt) for x in mine]
    want = gradient_message.total(messages, fmt, n, factor, dtype)
    as_int = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(out.cpu().view(as_int), want.view(as_int))
    sent = world * gradient_message.message_bytes(fmt, n)
    assert [(name, sizes[:2]) for name, sizes in calls] == [("alltoall_base", [[sent], [sent]])]


@pytest.mark.parametrize("op", ("sum", "avg", "premul"))
@pytest.mark.parametrize("n", (1, 1000, 4097))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.pairwise
@on_ranks(1, 2, 3, 4)
def test_bits_of_the_oracle(fmt, dtype, n, op):
    run_bits(fmt, dtype, n, op)


def scatter(dtype=torch.float32, op=SUM):
    world = dist.get_world_size()
    x, out = torch.ones(world * 8, device=device(), dtype=dtype), torch.empty(8, device=device(), dtype=dtype)
    QuantizedReduceScatter("float8")(out, x, dist.group.WORLD, op)


def reduce_model(*args, make=None, **kwargs):
    qshard.reduce_gradients_(plain_model() if make is None else make(), *args, **kwargs)


# By name: a call, and what its ValueError says. No rank has sent anything by then.
REFUSED = {
    "min": (partial(scatter, op=dist.ReduceOp.MIN), "are summed, not reduced by"),
    "max": (partial(scatter, op=dist.ReduceOp.MAX), "are summed, not reduced by"),
    "float64": (partial(scatter, torch.float64), "gradients of torch.float64 cannot travel in few bits"),
    "a format": (partial(reduce_model, "fp8"), "known are float8, mxfp8, nvfp4"),
    "a format of weights": (partial(reduce_model, "float8_tensorwise"), "known are float8, mxfp8, nvfp4"),
    "rounding": (partial(reduce_model, "float8", rounding="up"), "rounding is 'nearest' or 'stochastic', got 'up'"),
    "not sharded": (partial(reduce_model, "float8", make=Model), "call it after fully_shard"),
    "nothing chosen": (
        partial(reduce_model, "float8", filter_fn=lambda *_: False), "call it after fully_shard, and check filter_fn",
    ),
    "a hook": (partial(qshard.ddp_comm_hook, "int8"), "known are float8, mxfp8, nvfp4"),
    "DDP": (
        partial(reduce_model, "float8", make=lambda: DistributedDataParallel(Model().to(device()))),
        "register_comm_hook",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_a_refusal_comes_before_anything_is_sent(name):
    call, error = REFUSED[name]
    with collectives() as calls, pytest.raises(ValueError, match=error):
        call()
    assert not [name for name, _ in calls if name.startswith("alltoall")]


@on_ranks(2)
def test_a_hook_refuses_gradients_of_float64():
    ddp = DistributedDataParallel(Model().to(device(), torch.float64))
    ddp.register_comm_hook(None, qshard.ddp_comm_hook("float8"))
    with pytest.raises(ValueError, match="gradients of torch.float64 cannot travel in few bits"):
        backward(ddp, dtype=torch.float64)


# ------------------------------------------------------------------------------------------ FSDP2


def expected_messages(model, fmt, world):
    groups = [list(block.parameters()) for block in model.blocks] + [[model.head.weight]]
    for group in groups:
        n = sum(-(-p.shape[0] // world) * p.shape[1:].numel() for p in group)
        yield gradient_message.message_bytes(fmt, n)


@pytest.mark.parametrize("configure", (None, "factor", "premul", "sum"))
@pytest.mark.parametrize("weights", (None, "float8_blockwise", "nvfp4"))
@pytest.mark.parametrize("reduce_dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.pairwise
@on_ranks(2, 3, 4)
def test_gradients_of_fsdp2_are_near_plain_ones(fmt, reduce_dtype, weights, configure):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    models = [
        build(weights, mp_policy=policy) if weights else plain_model(mp_policy=policy)
        for _ in range(2)
    ]
    world = dist.get_world_size()
    plain, model = models
    for module in (m for each in models for m in each.modules() if isinstance(m, FSDPModule)):
        if configure == "factor":
            module.set_gradient_divide_factor(float(world))
        if configure == "sum":
            module.set_force_sum_reduction_for_comms(True)
    for module in (m for m in model.modules() if isinstance(m, FSDPModule)):
        if configure == "premul":  # which gloo has not, in plain FSDP2
            module.set_gradient_divide_factor(3.5)
    assert qshard.reduce_gradients_(model, fmt) is model
    backward(plain)
    with collectives() as calls:
        backward(model)
    names = {name for name, _ in calls}
    assert "alltoall_base" in names and not any("reduce_scatter" in name for name in names)
    # One message to each rank for each group, of the bytes of its padded flat buffer.
    sent = sorted(sizes[1][0] for name, sizes in calls if name == "alltoall_base")
    assert sent == sorted(world * message for message in expected_messages(model, fmt, world))
    got, want = gradients(model), gradients(plain)
    if configure == "premul":
        got = {name: gradient * (3.5 / world) for name, gradient in got.items()}
    assert 0 < relative_error(got, want) < ERROR[fmt]


@pytest.mark.parametrize("fmt", ("float8", "mxfp8"))
@on_ranks(2, 4)
def test_what_codes_hold_arrives_exactly(fmt):
    """Powers of two are codes: then nothing at all is different from plain reduction. (NVFP4's fp32
    scale of a tile is no power of two.)"""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = torch.nn.Linear(33, 65, bias=False, device=device())
        models.append(fully_shard(model, mesh=full_mesh()))
    qshard.reduce_gradients_(models[1], fmt)
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(0, 2, (1, 33), generator=generator).float().to(device())
    grad = torch.randint(0, 2, (1, 65), generator=generator).float().to(device()) * 4
    for model in models:
        model(x).backward(grad)
    got, want = (local(model.weight.grad) for model in models)
    assert torch.equal(got, want)


@pytest.mark.parametrize("rows", (1, 5))
@on_ranks(3, 4)
def test_uneven_and_empty_shards(rows):
    plain, model = plain_model(rows), plain_model(rows)
    qshard.reduce_gradients_(model, "float8")
    for each in (plain, model):
        backward(each)
    assert relative_error(gradients(model), gradients(plain)) < ERROR["float8"]
    for name, p in model.named_parameters():
        assert local(p.grad).shape == local(p).shape, name


def run_modes(mode):
    kwargs, recompute = {}, None
    if mode == "hsdp":
        kwargs["mesh"] = full_mesh(2, 2, names=("replicate", "shard"))
    if mode == "offload":
        kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=device().type == "cuda")
    if mode == "recompute":
        recompute = False
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Model(recompute=recompute).to(device())
        if mode == "compile":
            for block in model.blocks:
                block.compile(backend="inductor" if device().type == "cuda" else "aot_eager")
        models.append(shard(model, **kwargs))
    plain, model = models
    qshard.reduce_gradients_(model, "float8")
    for each in models:
        for microbatch in range(3):
            if mode == "accumulate":
                each.set_requires_gradient_sync(microbatch == 2)
            if mode == "accumulate reduced" or mode == "accumulate" or microbatch == 0:
                loss_of(each, batch(0, microbatch)).backward()
    error = relative_error(gradients(model), gradients(plain))
    assert 0 < error < ERROR["float8"]


@pytest.mark.parametrize("mode", ("accumulate", "accumulate reduced", "offload", "recompute", "compile"))
@on_ranks(2)
def test_modes_of_fsdp(mode):
    run_modes(mode)


@on_ranks(4)
def test_hsdp_reduces_within_shards():
    run_modes("hsdp")


@pytest.mark.parametrize("is_ours", (False, True), ids=("torch's", "ours"))
@pytest.mark.parametrize("weights", (None, "float8_blockwise"))
@on_ranks(4)
def test_beside_tensor_parallel(weights, is_ours):
    """FSDP2 over tensor parallelism: groups of the data-parallel dimension only."""
    mesh = full_mesh(2, 2, names=("data", "tensor"))
    styles = tensor_parallel if is_ours else torch_styles
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Model(256).to(device())
        plan = {"up": styles.ColwiseParallel(), "down": styles.RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], plan)
        if weights:
            quantize_model(model, weights, tp_mesh=mesh["tensor"])
        models.append(shard(model, mesh["data"]))
    plain, model = models
    qshard.reduce_gradients_(model, "float8")
    generator = torch.Generator().manual_seed(mesh["data"].get_local_rank())
    x = torch.randn(16, WIDTH, generator=generator).to(device())
    for each in models:
        loss_of(each, x).backward()
    assert bool(weights) == any(qshard.is_quantized(p) for p in model.parameters())
    assert 0 < relative_error(gradients(model), gradients(plain)) < ERROR["float8"]


class Experts(torch.nn.Module):
    """Every rank of the expert mesh runs its own over its own tokens."""

    def __init__(self, mesh):
        super().__init__()
        weight = torch.randn(4, WIDTH, WIDTH).to(device()) / WIDTH**0.5
        self.weight = torch.nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))

    def forward(self, x):
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return torch.einsum("tk,enk->tn", x, weight)


@pytest.mark.parametrize("weights", (None, "float8_blockwise"))
@on_ranks(4)
def test_beside_an_expert_mesh(weights):
    """Experts shard over what the expert mesh leaves of the ranks, the rest over all of them."""
    mesh, everyone = full_mesh(2, 2, names=("data", "expert")), full_mesh(4)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), Experts(mesh["expert"]))
        if weights:
            qshard.quantize_(model.to(device()), RECIPES[weights])
            expert, groups = model[1].weight, [mesh["expert"].get_group().group_name]
            with torch.no_grad():
                value = quantize_like(expert.detach(), weights, True, "1.weight", groups)
            parameter_swap.replace(expert, value)
        fully_shard(model[1], mesh=mesh["data"])
        models.append(fully_shard(model.to(device()), mesh=everyone))
    plain, model = models
    qshard.reduce_gradients_(model, "float8")
    x = batch(0)
    for each in models:
        with collectives() as calls:
            loss_of(each, x).backward()
    assert [name for name, _ in calls].count("alltoall_base") == 2, calls
    assert bool(weights) == all(qshard.is_quantized(m.weight) for m in model)
    assert 0 < relative_error(gradients(model), gradients(plain)) < ERROR["float8"]


@on_ranks(2, devices=("cuda",))
def test_peak_memory_is_plain_fsdps():
    """A large group: what a reduction takes beside its input is less than what stands before it."""
    peaks = {}
    for format in (None, "float8", "nvfp4"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(8)))
        model.to(device())
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in model:
            fully_shard(layer, mesh=full_mesh(), mp_policy=policy)
        fully_shard(model, mesh=full_mesh(), mp_policy=policy)
        qshard.reduce_gradients_(model, format)
        x = torch.randn(16, 2048, device=device())
        for _ in range(2):
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(x).square().mean().backward()
            torch.cuda.synchronize()
        peaks[format] = torch.cuda.max_memory_allocated() - before
        del model
    plain = peaks.pop(None)
    assert all(peak <= 1.01 * plain for peak in peaks.values()), (plain, peaks)


@on_ranks(2)
def test_none_undoes_it():
    plain, model = plain_model(), plain_model()
    names = set(model.state_dict())
    for rounding in ("nearest", "stochastic"):
        qshard.reduce_gradients_(model, "nvfp4", rounding=rounding)
    assert len(set(model.state_dict()) - names) == 3
    qshard.reduce_gradients_(model, None)
    assert set(model.state_dict()) == names
    for each in (plain, model):
        backward(each)
    got, want = gradients(model), gradients(plain)
    assert all(torch.equal(got[name], want[name]) for name in want)
    # Some of the modules only.
    qshard.reduce_gradients_(model, "float8", filter_fn=lambda _, name: name == "blocks.1")
    model.zero_grad()
    with collectives() as calls:
        backward(model)
    assert sum(name == "alltoall_base" for name, _ in calls) == 1


@on_ranks(1)
def test_one_rank_says_so_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model = plain_model()
            qshard.reduce_gradients_(model, "float8")
            backward(model)
            ddp = DistributedDataParallel(Model().to(device()))
            ddp.register_comm_hook(None, qshard.ddp_comm_hook("float8"))
            alone = copy.deepcopy(ddp.module)
            for each in (ddp, alone):
                backward(each)
            want = gradients(alone)
            assert all(torch.equal(g, want[n[7:]]) for n, g in gradients(ddp).items())
    texts = [str(w.message) for w in caught if "qshard" in str(w.message)]
    assert texts == [
        "qshard: reduce_gradients_ does nothing: no parameter is sharded over several ranks",
        "qshard: DDP on one rank reduces nothing",
    ]
