"""Reads of shards: whether one is served, and what an error says, is the same on all ranks, whatever
rows each of them holds. A rank that went on alone would wait for the others in its next collective."""

import copy
import pickle
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dist_helpers import device, full_mesh, gather_objects, on_ranks, shared_folder
from helpers import FORMATS, fit, is_quantized, loaded_as_weights, ops, value, weight
from models.formats import recipe_of
from models.weights import check_gathered, full_value, local
from test_shard_windows import chosen
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import qshard
from qshard._runtime.classes import Process

BUDGET_S = 180
keep_or_not = pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
# 192 rows over 4 ranks, or 3 rows over 2: some ranks' rows begin and end with blocks, others' do not.
SHAPES = ((1, 64), (3, 64), (5, 48), (192, 64), (256, 64))
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))

# ------------------------------------------------------------------------------------ weights


def plain_linear(fmt, shape, seed=0):
    rows, cols = fit(fmt, shape[0]), shape[1]
    linear = nn.Linear(cols, rows, bias=False, device=device())
    linear.weight = nn.Parameter(weight(rows, cols, seed=seed).to(device()))
    return linear


def sharded_late(fmt, keep_master, shape, seed=0):
    model = qshard.quantize_(nn.Sequential(plain_linear(fmt, shape, seed)), recipe_of(fmt), keep_master=keep_master)
    return fully_shard(model, mesh=full_mesh())


def quantized_late(fmt, keep_master, shape, seed=0):
    model = fully_shard(nn.Sequential(plain_linear(fmt, shape, seed)), mesh=full_mesh())
    return qshard.quantize_(model, recipe_of(fmt), keep_master=keep_master)


def distributed(fmt, keep_master, shape, seed=0):
    """A DTensor that no FSDP2 pads and gathers."""
    linear = plain_linear(fmt, shape, seed)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), full_mesh(), [Shard(0)]))
    return qshard.quantize_(nn.Sequential(linear), recipe_of(fmt), keep_master=keep_master)


KINDS = {"sharded late": sharded_late, "quantized late": quantized_late, "a DTensor": distributed}


def rows_of_rank(param, first, last):
    """The local rows that are rows [first, last) of the whole."""
    ranks = param.device_mesh.size()
    begin = param.device_mesh.get_local_rank() * -(-len(param) // ranks)
    rows = local(param).detach()
    return rows[max(0, first - begin) : max(0, last - begin)]


# ----------------------------------------------------------------- what comes before the read


def master_or_value(param):
    """What state_dict() of such a parameter holds, to be written."""
    alias = ops.master(local(param).detach())
    return local(param).detach() if alias is None else alias


def copy_of(model, make):
    other = make(*model.made_as, seed=1)
    return other[0].weight


def load_dcp(model, make):
    with shared_folder() as folder:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder)


def by_rows(param, other):
    """A rank without rows, or with one that is copied, sees no difference between this and a copy of all, which brings
    codes along where this may not: such reads are its own matter."""
    others = dist.get_world_size() - 1
    if len(param) <= -(-len(param) // (others + 1)) * others + 1:
        return param.mul_(2)
    for part in ((0, 1), (2, 3)):
        rows_of_rank(param, *part).copy_(rows_of_rank(other, *part))


WRITES = {
    "nothing": lambda model, make: None,
    "all": lambda model, make: model[0].weight.mul_(2),
    "first row": lambda model, make: rows_of_rank(model[0].weight, 0, 1).mul_(2),
    "last row": lambda model, make: rows_of_rank(model[0].weight, len(model[0].weight) - 1, 10**6).mul_(2),
    "columns": lambda model, make: local(model[0].weight).detach()[:, :32].mul_(2),
    "no columns": lambda model, make: local(model[0].weight).detach()[:, 3:3].mul_(2),
    "value": lambda model, make: master_or_value(model[0].weight).mul_(2),
    "a copy of all": lambda model, make: model[0].weight.copy_(copy_of(model, make)),
    "a copy of rows": lambda model, make: by_rows(model[0].weight, copy_of(model, make)),
    "a copy of its clone": lambda model, make: model[0].weight.copy_(model[0].weight.clone()),
    "rows of a written clone": lambda model, make: by_rows(model[0].weight, model[0].weight.clone().mul_(3)),
    "plain values": lambda model, make: local(model[0].weight).detach().copy_(value(local(model[0].weight)) * 2),
    "state dict": lambda model, make: model.load_state_dict(make(*model.made_as, seed=1).state_dict()),
    "checkpoint": load_dcp,
    "mark": lambda model, make: qshard.mark_written(local(model[0].weight)),
    "all, then flush": lambda model, make: (model[0].weight.mul_(2), qshard.flush(model)),
    "first row, then flush": lambda model, make: (rows_of_rank(model[0].weight, 0, 1).mul_(2), qshard.flush(model)),
}
BEFORE = {
    "fresh": lambda model: None,
    "stepped": lambda model: step_linear(model),
    "read": lambda model: outcome(ops.codes, local(model[0].weight).detach()),
    "flushed": lambda model: qshard.flush(model),
}


def step_linear(model):
    param = model[0].weight
    param.grad = torch.zeros_like(param)
    local(param.grad).fill_(0.25)
    torch.optim.SGD([param], lr=0.5).step()
    param.grad = None


# --------------------------------------------------------------------------------------- reads


def inputs(param):
    return weight(4, param.shape[1], seed=5).to(device())


def linear_of_dtensor(param):
    """All ranks, then a collective."""
    x = DTensor.from_local(inputs(param), param.device_mesh, [Replicate()], run_check=False)
    return F.linear(x, param).full_tensor()


def save_dcp(param):
    with shared_folder() as folder:
        dcp.save({"weight": param.detach()}, checkpoint_id=folder)


CODE_READS = {
    "codes": lambda param, shard: ops.codes(shard),
    "scale_inv": lambda param, shard: ops.scale_inv(shard),
    "dequantize": lambda param, shard: ops.dequantize(shard),
    "codes of a row": lambda param, shard: ops.codes(rows_of_rank(param, 0, 1)),
    "dequantize a column": lambda param, shard: ops.dequantize(shard[:, 3]),
    "linear": lambda param, shard: F.linear(inputs(param), shard),
    "linear with backward": lambda param, shard: torch.autograd.grad(
        F.linear(inputs(param).requires_grad_(), shard.requires_grad_()).sum(), shard
    ),
    "matmul": lambda param, shard: inputs(param) @ shard.t(),
    "mv": lambda param, shard: torch.mv(shard, inputs(param)[0]),
    "embedding": lambda param, shard: F.embedding(torch.empty(0, dtype=torch.long, device=device()), shard),
    "linear of a DTensor": lambda param, shard: linear_of_dtensor(param),
    "check": lambda param, shard: Process.check_codes_can_be_read([shard]),
}
VALUE_READS = {
    "clone": lambda param, shard: shard.clone(),
    "clone of columns": lambda param, shard: shard[:, :32].clone(),
    "transposed": lambda param, shard: shard.t().clone(),
    "transposed, contiguous": lambda param, shard: shard.t().clone(memory_format=torch.contiguous_format),
    "bfloat16, contiguous": lambda param, shard: shard.t().to(torch.bfloat16, memory_format=torch.contiguous_format),
    "repr": lambda param, shard: (repr(shard), repr(param)) and None,
    "sum": lambda param, shard: shard.sum().item(),
    "norm": lambda param, shard: param.norm().full_tensor(),
    "numpy": lambda param, shard: value(shard).cpu().numpy(),
    "tolist": lambda param, shard: shard.tolist(),
    "bfloat16": lambda param, shard: shard.to(torch.bfloat16),
    "plus": lambda param, shard: shard + 1,
    "pickle": lambda param, shard: pickle.loads(pickle.dumps(shard)),
    "save": lambda param, shard: loaded_as_weights(shard),
    "deepcopy": lambda param, shard: copy.deepcopy(shard),
    "full_tensor": lambda param, shard: full_value(param),
    "state_dict": lambda param, shard: nn.ParameterList([param]).state_dict()["0"],
    "dcp": lambda param, shard: save_dcp(param),
    "new_zeros": lambda param, shard: shard.new_zeros(shard.shape),
    "cat": lambda param, shard: torch.cat([shard, shard]),
    "isnan": lambda param, shard: bool(shard.isnan().any()),
    "iteration": lambda param, shard: [row.sum() for row in shard] and None,
    "storage": lambda param, shard: shard.untyped_storage().nbytes() and None,
    "attributes": lambda param, shard: (shard.is_contiguous(), shard.is_pinned(), str(shard.dtype), shard.is_leaf),
    "set_": lambda param, shard: shard.new_empty([]).set_(shard),
    "equal": lambda param, shard: torch.equal(shard, shard.clone()),
}
# Served where a master is kept, and refused elsewhere.
ADDRESS_READS = {
    "numpy itself": lambda param, shard: shard.numpy() is None,
    "data_ptr": lambda param, shard: shard.data_ptr() is None,
    "dlpack": lambda param, shard: torch.from_dlpack(shard),
    "typed storage": lambda param, shard: shard.storage() is None,
    "item": lambda param, shard: shard[:1, :1].sum().item(),
    "view as bytes": lambda param, shard: shard.view(torch.int32),
}
READS = CODE_READS | VALUE_READS | ADDRESS_READS


def outcome(function, *args):
    """Whether the result is quantized, or what the error says, without the numbers of this rank's rows."""
    try:
        with torch.enable_grad():
            result = function(*args)
    except Exception as error:  # noqa: BLE001: its text is what is compared
        text = str(error).splitlines()[0]
        return f"{type(error).__name__}: {re.sub(r'[0-9]+', '#', text)}"
    local_result = result._local_tensor if isinstance(result, DTensor) else result
    return f"a {'quantized' if is_quantized(local_result) else 'plain'} result"


def check_outcomes(facts, note):
    by_rank = gather_objects(facts)
    split = {
        name: [facts[name] for facts in by_rank]
        for name in facts
        if len({facts[name] for facts in by_rank}) > 1
    }
    assert not split, (*note, split)


def make(kind, *made_as, seed=0):
    model = KINDS[kind](*made_as, seed=seed)
    model.made_as = made_as
    return model


@torch.no_grad()
def run_reads(kind, fmt, keep_master, shape, written, before, reads):
    makes = lambda *made_as, seed: make(kind, *made_as, seed=seed)  # noqa: E731
    model = make(kind, fmt, keep_master, shape)
    BEFORE[before](model)
    outcome(WRITES[written], model, makes)
    param = model[0].weight
    facts = {name: outcome(READS[name], param, local(param).detach()) for name in reads}
    note = kind, fmt, keep_master, shape, written, before
    check_outcomes(facts, note)
    refused = {name: text for name, text in facts.items() if "Error" in text}
    assert not refused.keys() & VALUE_READS.keys(), (*note, refused)
    for name in refused.keys() & CODE_READS.keys():
        assert "Call qshard.flush(model) on all ranks" in refused[name], (*note, refused)
    qshard.flush(model)
    served = {name: outcome(READS[name], param, local(param).detach()) for name in CODE_READS}
    assert not any("Error" in text for text in served.values()), (*note, served)
    check_outcomes(served, note)
    if kind != "a DTensor":
        assert check_gathered(model) == 1


# All reads in turn, of which the first may leave codes to the later ones; or one of them, and a flush.
ORDERS = [list(READS), list(READS)[::-1], *([name] for name in CODE_READS)]


@pytest.mark.pairwise
@shapes
@keep_or_not
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, 4)
def test_a_read_is_served_on_all_ranks_or_on_none(kind, keep_master, shape):
    half = chosen((0, 1), kind, keep_master, shape, dist.get_world_size())
    for written in list(WRITES)[half::2]:
        names = kind, keep_master, shape, written
        before, reads = chosen(BEFORE, *names), chosen(ORDERS, *names)
        run_reads(kind, chosen(FORMATS, *names), keep_master, shape, written, before, reads)
