"""The first use of a written tensor makes its codes, once, on whatever thread or rank that is."""

import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from collective_calls import collectives
from dist_helpers import device, full_mesh, on_ranks, shared_folder
from forked import outcome
from helpers import FORMATS, assert_same, fit, ops, quantized_alike, value, weight
from models.formats import RECIPES
from models.tensor_parallel import build, replicated
from models.training import batch
from models.weights import check_gathered, full_value, local
from test_adoption_sharded import sharded
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import qshard
from qshard.tensor_parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

BUDGET_S = 90
formats = pytest.mark.parametrize("fmt", FORMATS)
keep_or_not = pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
THREADS = 8
READS = {
    "linear": lambda q: F.linear(torch.eye(q.shape[1]), q),
    "dequantize": lambda q: ops.dequantize(q).t(),
    "codes": lambda q: ops.codes(q).float().t(),
    "flush": lambda q: (ops.flush([q]), ops.dequantize(q).t())[1],
}


def read_at_once(q, read):
    """What each of several threads reads that start together."""
    start, got = threading.Barrier(THREADS), [None] * THREADS

    def work(i):
        start.wait()
        got[i] = READS[read](q)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


def count_wrong(fmt, keep_master, read, repeats=10):
    wrong = 0
    for _ in range(repeats):
        q = ops.quantize(weight(fit(fmt, 512), 256), fmt, keep_master=keep_master)
        q.mul_(1.3)
        expected = READS[read](quantized_alike(value(q), q, keep_master))
        wrong += any(g is None or not torch.equal(g, expected) for g in read_at_once(q, read))
    return wrong


@pytest.mark.pairwise
@pytest.mark.parametrize("read", READS)
@keep_or_not
@formats
def test_threads_that_read_a_written_tensor_first(fmt, keep_master, read):
    """In a child: two threads that flush one tensor may end the process."""
    answer = outcome(lambda: count_wrong(fmt, keep_master, read))
    assert answer == ("returned", "0"), answer


@pytest.mark.pairwise
@pytest.mark.parametrize("rows", [1, 3, 257], ids="{} rows".format)
@keep_or_not
@formats
@on_ranks(2, devices=("cpu",))
def test_a_forward_after_dcp_load(fmt, keep_master, rows):
    """All ranks call dcp.load: what follows needs no qshard.flush."""
    model, donor = (sharded(fmt, keep_master, rows, seed) for seed in (0, 1))
    x = batch(0)
    model(x)
    with shared_folder() as folder:
        dcp.save({"model": donor.state_dict()}, checkpoint_id=folder)
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    values = full_value(donor[0].weight)
    assert_same(full_value(model[0].weight), values)
    if keep_master and fmt != "float8_delayed":
        assert_same(model(x), donor(x))
    assert check_gathered(model) == 1
    with torch.no_grad():
        model[0].weight.mul_(2.0)
        assert_same(full_value(model[0].weight), values * 2)
    assert check_gathered(model) == 1


# ---------------------------------------------------------------------- tensor parallelism alone

DIM, HIDDEN = 64, 128


def make_parts(fmt, plan):
    mesh = full_mesh(1, 2, names=("dp", "tp"))
    return build(fmt, mesh, DIM, HIDDEN, order="pq", plan=plan)


def inputs(rows=4):
    x = torch.randn(2, rows, DIM, generator=torch.Generator().manual_seed(0))
    return x.to(device())


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f != "float8_delayed"])
@on_ranks(2)
def test_a_forward_after_dcp_load_of_tensor_parallel_parts(fmt):
    """No all-gather follows that could agree on a scale: the load does, which all ranks call."""
    model, donor = (make_parts(fmt, replicated) for _ in range(2))
    with torch.no_grad():
        for weight in (donor.up.weight, donor.down.weight):
            weight.mul_(2 + weight.device_mesh.get_rank())  # each rank's part by another factor
    qshard.flush(donor)
    want = donor(inputs())
    for _ in range(2):
        with shared_folder() as folder:
            dcp.save({"model": donor.state_dict()}, checkpoint_id=folder)
            dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
        assert_same(model(inputs()), want)


@pytest.mark.parametrize("name", ["up", "down"])
@pytest.mark.parametrize("fmt", ["float8_tensorwise", "nvfp4"])
@on_ranks(2)
def test_what_cannot_be_read_is_refused_before_any_collective(fmt, name):
    """The second linear cannot be read: the forward says so before the collectives of the first."""
    model = make_parts(fmt, replicated)
    x = inputs()
    with torch.no_grad():
        model(x)
        local(getattr(model, name).weight).mul_(2)
        with collectives() as calls, pytest.raises(RuntimeError, match="qshard.flush"):
            model(x)
        assert not calls, calls
        qshard.flush(model)
        model(x)


# ----------------------------------------------------------------- sequence parallelism

# A gather of tokens stands before the linear: what its module then reads is looked at before that.


class Gated(torch.nn.Module):
    """A SwiGLU MLP of linears."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def styled(plan):
    """A model of linears, and a parallelize_module of qshard's styles."""

    def make(mesh):
        model = Gated().to(device())
        tokens = {"input_layouts": Shard(1)}
        column, first = ColwiseParallel(**tokens), ColwiseParallel(**tokens)
        whole = {"desired_input_layouts": Replicate(), "use_local_output": False, **tokens}
        plans = {
            "column": {"gate": first, "up": column, "down": RowwiseParallel(output_layouts=Shard(1))},
            "prepared": {
                "": PrepareModuleInput(**whole),
                "gate": ColwiseParallel(),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            },
        }
        return parallelize_module(model, mesh, plans[plan])

    return make


def constructed(make, **sizes):
    return lambda mesh: make(**sizes, tp_mesh=mesh, sequence_parallel=True, device=device())


COLUMN = {"in_features": DIM, "out_features": HIDDEN, "parallel_mode": "column"}
MLP = {"hidden_size": DIM, "ffn_hidden_size": HIDDEN, "set_parallel_mode": True}
# By name: what makes the model, and the weights that a forward refuses before it sends anything.
GATHERING = {
    "Linear": (constructed(qshard.nn.Linear, **COLUMN), ("weight",)),
    "LayerNormLinear": (constructed(qshard.nn.LayerNormLinear, **COLUMN), ("weight",)),
    "LayerNormMLP": (constructed(qshard.nn.LayerNormMLP, **MLP), ("fc1_weight", "fc2_weight")),
    "ColwiseParallel": (styled("column"), ("gate.weight",)),
    "PrepareModuleInput": (styled("prepared"), ("gate.weight", "up.weight", "down.weight")),
}


@pytest.mark.parametrize("kind", GATHERING)
@pytest.mark.parametrize("fmt", ["float8_tensorwise", "nvfp4"])
@on_ranks(2)
def test_what_cannot_be_read_is_refused_before_tokens_are_gathered(fmt, kind):
    make, names = GATHERING[kind]
    model = make(full_mesh(names=("tp",)))
    qshard.quantize_(model, RECIPES[fmt], filter_fn=lambda *_: True)
    x = inputs(8).chunk(2, 1)[torch.distributed.get_rank()].contiguous()
    x = x if kind in ("ColwiseParallel", "PrepareModuleInput") else x.transpose(0, 1).contiguous()
    for name in names:
        model(x)
        with torch.no_grad():
            local(model.get_parameter(name)).mul_(2)
        with collectives() as calls, pytest.raises(RuntimeError, match="qshard.flush"):
            model(x)
        assert not calls, (name, calls)
        qshard.flush(model)
