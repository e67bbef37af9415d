"""fuse_ of models that qshard's styles parallelize: the values, gradients and messages of the linears one
by one, by one operator."""

import contextlib
import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from dist_helpers import device, full_mesh, on_ranks, on_worlds
from models.formats import DELAYED, RECIPES
from models.tensor_parallel import varied, write
from collective_calls import Sent
from test_tensor_parallel_modules import TOLERANCE
from test_tensor_parallel_training import batch, full_grad
from test_wgrad_accumulation import added
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module, style

import qshard
from qshard import tensor_parallel as styles
from qshard.nn import swiglu

DIM, HIDDEN = 256, 512
FORMATS = ("float8_tensorwise", DELAYED, "float8_blockwise", "mxfp8", "nvfp4")


class MLP(nn.Module):
    def __init__(self, dim, hidden, bias):
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=bias)
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


qshard.fuse.register(MLP, qshard.fuse.GatedMLP("gate", "up", "down", F.silu))


class Block(nn.Module):
    def __init__(self, dim=DIM, hidden=HIDDEN, bias=True):
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(dim, eps=1e-5), MLP(dim, hidden, bias)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def of_tokens(**kwargs):
    return {
        "norm": SequenceParallel(),
        **{f"mlp.{name}": styles.ColwiseParallel(input_layouts=Shard(1)) for name in ("gate", "up")},
        "mlp.down": styles.RowwiseParallel(output_layouts=Shard(1)),
    }


def replicated():
    return {
        **{f"mlp.{name}": styles.ColwiseParallel() for name in ("gate", "up")},
        "mlp.down": styles.RowwiseParallel(),
    }


def prepared():
    return {
        "norm": SequenceParallel(),
        "mlp": styles.PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=False
        ),
        **{f"mlp.{name}": styles.ColwiseParallel() for name in ("gate", "up")},
        "mlp.down": styles.RowwiseParallel(output_layouts=Shard(1)),
    }


PLANS = (of_tokens, replicated, prepared)


@torch.no_grad()
def initialise(model):
    for seed, parameter in enumerate(model.parameters()):
        if parameter.dim() == 2:
            write(parameter, varied(*parameter.shape, seed).to(device()))
        else:
            write(parameter, torch.linspace(0.5, 1.5, parameter.numel(), device=device()))
    return model


class Counted:
    """How often the operator runs for three linears."""

    def __enter__(self):
        self.operator, self.calls = swiglu.swiglu_mlp, 0

        def call(*args, **kwargs):
            self.calls += 1
            return self.operator(*args, **kwargs)

        swiglu.swiglu_mlp = call
        return self

    def __exit__(self, *error):
        swiglu.swiglu_mlp = self.operator


def results(model, x, compiled=False):
    """Output, gradients and, of eager code, what was gathered: under a mode Dynamo compiles nothing."""
    x = x.clone().requires_grad_()
    called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    sent = Sent()
    with contextlib.nullcontext() if compiled else sent, warnings.catch_warnings():
        warnings.filterwarnings("error", message="To construct DTensor")  # torch's, of a local tensor with a graph
        y = called(x)
        y.square().sum().backward()
    y = y.full_tensor() if isinstance(y, DTensor) else y
    grads = {name: full_grad(p) for name, p in model.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}, sent.gathered


def assert_same(mine, other, is_exact, norm="norm.weight"):
    """Bits, of all that does not depend on how torch sums a norm's rows."""
    largest = TOLERANCE[device().type][1]
    for name, value in mine.items():
        error = (value - other[name]).norm() / other[name].norm()
        assert error <= (1e-6 if is_exact else largest), (name, error)


def part_of(x, mesh, plan):
    return x if plan is replicated else x.chunk(mesh.size(), 1)[mesh.get_local_rank()].contiguous()


def run_fused(plan, formats, bias, dim=DIM, hidden=HIDDEN):
    mesh = full_mesh(names=("tp",))
    for format in formats:
        model = initialise(Block(dim, hidden, bias).to(device()))
        parallelize_module(model, mesh, plan())
        qshard.quantize_(model, RECIPES[format])
        fused = copy.deepcopy(model)
        report = qshard.fuse_(fused)
        assert [row.name for row in report] == ["norm", "mlp"]
        x = part_of(batch(0, 0, dim), mesh, plan)
        want, gathered = results(model, x)
        with Counted() as counted:
            got, sent = results(fused, x)
        assert counted.calls == 1, format
        assert sent == gathered, (format, sent, gathered)
        assert_same(got, want, device().type == "cpu")


@pytest.mark.parametrize("plan", PLANS)
@on_worlds(2)
def test_one_operator_with_the_values_of_three(world, plan):
    world.run(run_fused, plan, FORMATS, plan is of_tokens)
    world.run(run_fused, plan, ("float8_tensorwise",), True, 100, 262)


@pytest.mark.parametrize("order", ["pquf", "upqf", "pqfu"])
@on_ranks(4)
def test_trains_under_fsdp2_fused_at_any_time(order):
    mesh = full_mesh(2, 2, names=("dp", "tp"))
    rank = mesh["dp"].get_local_rank()
    outcomes = []
    for is_fused in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block()).to(device())
        for step in order:
            if step == "p":
                for block in model:
                    parallelize_module(block, mesh["tp"], of_tokens())
            elif step == "q":
                qshard.quantize_(model, RECIPES["float8_blockwise"])
            elif step == "f":
                for block in (*model, model):
                    fully_shard(block, mesh=mesh["dp"])
            elif is_fused:
                assert len(qshard.fuse_(model)) == 4
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            x = part_of(batch(step, rank), mesh["tp"], of_tokens)
            with Counted() as counted:
                loss = model(x).square().mean()
            assert counted.calls == (2 if is_fused else 0)
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
        outcomes.append(torch.stack(losses))
    rtol = 1e-5 if device().type == "cpu" else TOLERANCE["cuda"][0]
    torch.testing.assert_close(*outcomes, rtol=rtol, atol=0)


@on_ranks(2)
def test_gradients_are_added_within_gemms():
    """wgrads of all three linears go into the GEMM, as one by one."""
    mesh = full_mesh(names=("tp",))
    model = initialise(Block(bias=False).to(device()))
    parallelize_module(model, mesh, of_tokens())
    qshard.quantize_(model, RECIPES["float8_blockwise"])
    qshard.fuse_(model)
    x = part_of(batch(0, 0), mesh, of_tokens)
    counts = []
    for _ in range(2):
        loss = model(x).square().sum()
        counts.append(added(loss.backward))
    assert counts == [0, 3], counts


@on_ranks(2)
def test_blocks_are_compiled_once():
    """Blocks of one kind have one graph: what tells hooks apart is no part of it."""
    mesh = full_mesh(names=("tp",))
    model = nn.Sequential(*(Block(bias=False) for _ in range(3))).to(device())
    for block in model:
        parallelize_module(block, mesh, of_tokens())
    qshard.quantize_(model, RECIPES["float8_tensorwise"])
    qshard.fuse_(model)
    x = part_of(batch(0, 0), mesh, of_tokens)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for block in model:
            block.compile(backend="aot_eager", fullgraph=True)
            block(x.clone().requires_grad_()).square().sum().backward()


@pytest.mark.parametrize("plan", [of_tokens, replicated])
@on_ranks(2)
def test_compiled_fused_layers_give_the_same_gradients(plan):
    mesh = full_mesh(names=("tp",))
    model = initialise(Block(bias=False).to(device()))
    parallelize_module(model, mesh, plan())
    qshard.quantize_(model, RECIPES["float8_tensorwise"])
    fused = copy.deepcopy(model)
    qshard.fuse_(fused)
    x = part_of(batch(0, 0), mesh, plan)
    want, _ = results(model, x)
    got, _ = results(fused, x, compiled=True)
    for name, value in got.items():
        assert (value - want[name]).norm() < 1e-3 * want[name].norm(), name


def torch_styles():
    return {
        **{f"mlp.{name}": style.ColwiseParallel() for name in ("gate", "up")},
        "mlp.down": style.RowwiseParallel(),
    }


def gates_gathered():
    return {**replicated(), "mlp.gate": styles.ColwiseParallel(output_layouts=Replicate()),
            "mlp.up": styles.ColwiseParallel(output_layouts=Replicate()),
            "mlp.down": styles.RowwiseParallel(input_layouts=Replicate())}


@on_ranks(2)
def test_linears_that_have_to_be_called_are():
    """Where a linear has to be called: other styles, layouts between them, hooks."""
    mesh = full_mesh(names=("tp",))
    x = batch(0, 0)
    for plan in (torch_styles, gates_gathered, replicated):
        model = initialise(Block(bias=False).to(device()))
        parallelize_module(model, mesh, plan())
        qshard.quantize_(model, RECIPES["float8_blockwise"], tp_mesh=mesh)
        if plan is replicated:
            model.mlp.up.register_forward_hook(lambda module, args, y: y * 2)
        fused = copy.deepcopy(model)
        qshard.fuse_(fused)
        want, _ = results(model, x)
        with Counted() as counted:
            got, _ = results(fused, x)
        assert counted.calls == 0, plan
        assert_same(got, want, device().type == "cpu")
