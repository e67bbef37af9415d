"""What a watch says of a model that several ranks train, beside plain torch over the operands of all of them."""

import json
import tempfile

import pytest
import torch
import torch.distributed as dist
from dist_helpers import device, full_mesh, on_ranks
from models.blocks import MLP
from models.fsdp2 import shard
from reference import emulation, statistics
from reference.formats import FORMATS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from watched_models import HIDDEN, WIDTH, Model, Recorder, assert_says

import qshard
from qshard.watching.statistics import OPERANDS

RECIPES = (
    qshard.Float8CurrentScaling(emulate=True),
    qshard.Float8RowwiseScaling(emulate=True),
    qshard.Float8BlockScaling(emulate=True),
    qshard.MXFP8BlockScaling(emulate=True),
    qshard.NVFP4BlockScaling(emulate=True),
)


def of_all_ranks(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def local_weights(model):
    return {
        name: (param.to_local() if isinstance(param, DTensor) else param).detach().float().cpu().clone()
        for name, param in model.named_parameters()
        if name.endswith(".weight") and param.dim() == 2
    }


def numbers(said):
    """All of a WeightStatistics but bytes, which are of one rank."""
    return {operand: {**vars(getattr(said, operand)), "bytes": 0} for operand in OPERANDS}


def check(watch, recorder, recipe, weights):
    """`weights`: by rank, the parts by name that ranks quantize by themselves."""
    format = FORMATS[recipe.format.partition("[")[0]]
    inputs, gradients = of_all_ranks(recorder.inputs), of_all_ranks(recorder.gradients)
    assert len(watch.last) == len(recorder.inputs)
    for name, got in watch.last.items():
        parts = [statistics.parts_of_weight(of_rank[name], format) for of_rank in weights]
        assert_says(got.weight, [(of_rank[name], *p) for of_rank, p in zip(weights, parts)], format.code_dtype)
        xs = [x for of_rank in inputs for x in of_rank[name]]
        assert_says(got.input, [(x, *statistics.parts_of_rows(x, format)) for x in xs], format.code_dtype)
        if format.code_bits == 4:
            assert got.gradient is not None  # rounded stochastically
            continue
        folded = [
            emulation.folded(grad, of_rank[name], format)
            for of_rank, grads in zip(weights * (len(gradients) // len(weights)), gradients)
            for grad in grads[name]
        ]
        rows = [(grad, *statistics.parts_of_rows(grad, format, True)) for grad in folded]
        assert_says(got.gradient, rows, format.grad_dtype)
    first, *others = of_all_ranks({name: numbers(said) for name, said in watch.last.items()})
    assert all(other == first for other in others)  # bit for bit


def batch(step, microbatch=0):
    """This rank's input."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + dist.get_rank())
    return torch.randn(16, WIDTH, generator=generator).to(device()).requires_grad_()


def train(model, optimizer, step, microbatches=1):
    for microbatch in range(microbatches):
        model(batch(step, microbatch)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train_watched(model, recorder, weights, recipe, microbatches=1):
    """The first step is sampled, and the third, which is checked again; the second is not."""
    optimizer, steps = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), []
    with qshard.watch(model, every=2, to=lambda step, found: steps.append((step, len(found)))) as watch:
        train(model, optimizer, 0, microbatches)
        check_later = dict(recorder.inputs), dict(recorder.gradients)
        recorder.inputs, recorder.gradients = {}, {}
        train(model, optimizer, 1, microbatches)
    assert steps == [(0, len(watch.last))]
    recorder.inputs, recorder.gradients = check_later
    check(watch, recorder, recipe, weights)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.format)
@pytest.mark.parametrize("recompute", (None, False, True))
@pytest.mark.parametrize("microbatches", (1, 3))
@pytest.mark.each_value
@on_ranks(2, 3)
def test_fsdp2(recipe, recompute, microbatches):
    torch.manual_seed(0)
    model = Model(recompute).to(device())
    qshard.quantize_(model, recipe)
    weights, recorder = local_weights(model), Recorder(model)
    shard(model)
    train_watched(model, recorder, [weights], recipe, microbatches)


@pytest.mark.parametrize("recipe", RECIPES[2:3], ids=lambda recipe: recipe.format)
@on_ranks(4, devices=("cpu",))
def test_hsdp(recipe):
    torch.manual_seed(0)
    model = Model().to(device())
    qshard.quantize_(model, recipe)
    weights, recorder = local_weights(model), Recorder(model)
    shard(model, init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard")))
    train_watched(model, recorder, [weights], recipe)


@on_ranks(2)
def test_rank_0_writes_the_file():
    (folder,) = set(of_all_ranks(tempfile.mkdtemp())[:1])
    torch.manual_seed(0)
    model = Model().to(device())
    qshard.quantize_(model, RECIPES[2])
    shard(model)
    with qshard.watch(model, every=1, to=f"{folder}/watched.jsonl"):
        train(model, torch.optim.SGD(model.parameters(), lr=1e-2), 0)
    of_all_ranks(None)
    lines = [json.loads(line) for line in open(f"{folder}/watched.jsonl")]
    assert [line["name"] for line in lines] == [name for name, p in model.named_parameters() if p.dim() == 2]


@pytest.mark.parametrize("recipe", (RECIPES[2], RECIPES[3]), ids=lambda recipe: recipe.format)
@on_ranks(2)
def test_ddp(recipe):
    torch.manual_seed(0)
    model = Model().to(device())
    qshard.quantize_(model, recipe)
    weights, recorder = local_weights(model), Recorder(model)
    train_watched(DistributedDataParallel(model).module, recorder, [weights], recipe)


@pytest.mark.parametrize("recipe", (RECIPES[2], RECIPES[3]), ids=lambda recipe: recipe.format)
@on_ranks(2)
def test_tensor_parallelism(recipe):
    torch.manual_seed(0)
    model = MLP(WIDTH, 2 * HIDDEN).to(device())
    mesh = full_mesh()
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    qshard.quantize_(model, recipe, tp_mesh=mesh)
    weights, recorder = of_all_ranks(local_weights(model)), Recorder(model)
    train_watched(model, recorder, weights, recipe)


@pytest.mark.parametrize("recipe", (RECIPES[0], RECIPES[2], RECIPES[3]), ids=lambda recipe: recipe.format)
@on_ranks(2)
def test_sequence_parallelism(recipe):
    """Inputs of columns and gradients of rows are gathered in codes: ranks count their own tokens before."""
    torch.manual_seed(0)
    model = MLP(WIDTH, 2 * HIDDEN).to(device())
    mesh, styles = full_mesh(), qshard.tensor_parallel
    plan = {
        "norm": SequenceParallel(),
        "up": styles.ColwiseParallel(input_layouts=Shard(1)),
        "down": styles.RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, plan)
    qshard.quantize_(model, recipe)
    weights, recorder = of_all_ranks(local_weights(model)), Recorder(model, before_styles=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with qshard.watch(model, every=1) as watch:
        x = batch(0).detach()[None].requires_grad_()
        y = model(x)
        (y.to_local() if isinstance(y, DTensor) else y).square().sum().backward()
        optimizer.step()
    format = FORMATS[recipe.format.partition("[")[0]]
    inputs = [x for of_rank in of_all_ranks(recorder.inputs) for x in of_rank["up.weight"]]
    grads = [x for of_rank in of_all_ranks(recorder.gradients) for x in of_rank["down.weight"]]
    for said, parts, is_gradient in (("up.weight", inputs, False), ("down.weight", grads, True)):
        got = watch.last[said].gradient if is_gradient else watch.last[said].input
        amax = torch.cat(parts).abs().max() if format.block is None else None  # which ranks agree on
        operands = [(x, *statistics.parts_of_rows(x, format, is_gradient, amax=amax)) for x in parts]
        assert_says(got, operands, format.grad_dtype if is_gradient else format.code_dtype)
        assert got.relative_error > 0
    assert len(watch.last) == len(weights[0])


@pytest.mark.parametrize("recipe", (RECIPES[0], RECIPES[3]), ids=lambda recipe: recipe.format)
@on_ranks(2, devices=("cpu",))
def test_compiled_blocks(recipe):
    """They say what eager blocks say, of each linear."""
    said = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Model().to(device())
        qshard.quantize_(model, recipe)
        if compiled:
            for block in model.blocks:
                block.compile(backend="aot_eager")
        shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        with qshard.watch(model, every=1) as watch:
            train(model, optimizer, 0)
        said.append(watch.last)
    for name, eager in said[0].items():
        for operand in ("weight", "input", "gradient"):
            want, got = getattr(eager, operand), getattr(said[1][name], operand)
            exact = ("amax", "scale_min", "scale_max", "underflow", "saturated", "bytes")
            assert [getattr(got, key) for key in exact] == [getattr(want, key) for key in exact], (name, operand)
            assert abs(got.snr_db - want.snr_db) < 1e-9, (name, operand)
