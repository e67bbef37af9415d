"""What qshard.nn's modules over a tensor-parallel mesh hold, and what they refuse."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dist_helpers import device, full_mesh, on_ranks
from models.formats import RECIPES
from test_tensor_parallel_modules import TOLERANCE, ops
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import qshard


@on_ranks(2)
def test_parameters_are_parts_of_the_whole():
    """Parts of what the module would have whole; a bias once; unquantized modules too."""
    mesh = full_mesh(names=("tp",))
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for mode, dim in (("column", 0), ("row", 1), (None, None)):
        torch.manual_seed(1)
        whole = qshard.nn.Linear(48, 96, device=device())
        torch.manual_seed(1)
        module = qshard.nn.Linear(48, 96, device=device(), parallel_mode=mode, tp_mesh=mesh)
        for name in ("weight", "bias"):
            assert torch.equal(getattr(module, name).full_tensor(), getattr(whole, name))
        if dim is not None:
            assert module.weight.placements == (Shard(dim),)
            assert torch.equal(module.weight.to_local(), whole.weight.chunk(ranks, dim)[rank])
        x = torch.randn(6, 48, generator=torch.Generator().manual_seed(2)).to(device())
        y = module(x.chunk(ranks, 1)[rank] if mode == "row" else x)
        want = whole(x).chunk(ranks, 1)[rank] if mode == "column" else whole(x)
        torch.testing.assert_close(y, want)
    both = qshard.nn.Linear(
        48, 96, device=device(), parallel_mode="row", tp_mesh=mesh, return_bias=True
    )
    y, bias = both(x.chunk(ranks, 1)[rank])
    assert type(bias) is torch.Tensor and bias.shape == (96,)
    torch.testing.assert_close(y, F.linear(x, both.weight.full_tensor()))
    module = qshard.nn.LayerNormLinear(
        48,
        96,
        device=device(),
        parallel_mode="column",
        sequence_parallel=True,
        tp_mesh=mesh,
        return_layernorm_output=True,
        return_layernorm_output_gathered=True,
    )
    _, normed = module(x.chunk(ranks)[rank])
    torch.testing.assert_close(normed, F.layer_norm(x, (48,)))
    # Whole weights over cut tokens: gradients are sums.
    options = {"sequence_parallel": True, "tp_mesh": mesh, "device": device()}
    for format in (None, "float8_blockwise"):
        torch.manual_seed(1)
        whole = qshard.nn.Linear(48, 96, device=device())
        torch.manual_seed(1)
        module = qshard.nn.Linear(48, 96, **options)
        for each in (whole, module) if format else ():
            qshard.quantize_(each, RECIPES[format], filter_fn=lambda *_: True)
        whole(x).square().sum().backward()
        module(x.chunk(ranks)[rank]).square().sum().backward()
        for name in ("weight", "bias"):
            mine, want = getattr(module, name).grad.full_tensor(), getattr(whole, name).grad
            torch.testing.assert_close(mine, want, rtol=TOLERANCE[device().type][1], atol=1e-3)
    meta = qshard.nn.Linear(48, 96, device="meta", parallel_mode="column", tp_mesh=mesh)
    qshard.quantize_(meta, RECIPES["float8_blockwise"], filter_fn=lambda *_: True)
    meta.to_empty(device=device())
    torch.manual_seed(1)
    meta.reset_parameters()
    torch.manual_seed(1)
    whole = qshard.nn.Linear(48, 96, device=device())
    assert torch.equal(ops.master(meta.weight._local_tensor), whole.weight.chunk(ranks)[rank])
    with qshard.quantized_model_init(recipe=RECIPES["float8_blockwise"]):
        made = qshard.nn.Linear(48, 96, device=device(), parallel_mode="column", tp_mesh=mesh)
    assert qshard.is_quantized(made.weight) and made(x).shape == (6, 96 // ranks)


@contextlib.contextmanager
def refused(error, message):
    """The one error that every rank gets, before any of them waits for another."""
    with pytest.raises(error, match=message):
        yield
    dist.barrier()


class Meshes:
    """Two ranks of tensor parallelism, and linears over them."""

    def __init__(self):
        self.mesh = full_mesh(1, 2, names=("dp", "tp"))
        self.tp = self.mesh["tp"]

    def linear(self, rows=48, cols=32, **kwargs):
        return qshard.nn.Linear(cols, rows, device=device(), **kwargs)

    def column(self, **kwargs):
        return self.linear(parallel_mode="column", **kwargs)

    def over_all(self):
        return self.column(tp_mesh=self.tp, weight_mesh=self.mesh._flatten("all"))

    def quantized(self):
        return qshard.quantize_(self.column(), RECIPES["mxfp8"], filter_fn=lambda *_: True)

    def row(self):
        return self.linear(parallel_mode="row", sequence_parallel=True, tp_mesh=self.tp)

    def row_within_fsdp(self):
        other = self.linear(parallel_mode="row", tp_mesh=self.tp)
        fully_shard(nn.Sequential(other), mesh=self.mesh["dp"])
        return other


def sum_gradient(module, x):
    return torch.func.grad(lambda x: module(x).sum())(x)


def ones(*shape):
    return torch.ones(*shape, device=device())


REFUSED = {
    "no ranks": (
        NotImplementedError, "tp_size=2 without its ranks", lambda m: m.column(tp_size=2),
    ),
    "other size": (
        ValueError, "tp_size=4, and the mesh or group has 2 ranks",
        lambda m: m.column(tp_size=4, tp_mesh=m.tp),
    ),
    "mesh and group": (
        ValueError, "tp_mesh and tp_group: leave one of the two out",
        lambda m: m.column(tp_mesh=m.tp, tp_group=m.tp.get_group()),
    ),
    "two dimensions": (
        ValueError, "must be a DeviceMesh of one dimension", lambda m: m.column(tp_mesh=m.mesh),
    ),
    "weights over two dimensions": (
        ValueError, "weight_mesh must be a DeviceMesh of one dimension",
        lambda m: m.column(tp_mesh=m.tp, weight_mesh=m.mesh),
    ),
    "weights over other ranks": (
        ValueError, "does not hold the ranks",
        lambda m: m.column(tp_mesh=m.tp, weight_mesh=m.mesh["dp"]),
    ),
    "accumulation": (
        NotImplementedError, "fuse_wgrad_accumulation is not supported",
        lambda m: m.column(tp_mesh=m.tp, fuse_wgrad_accumulation=True),
    ),
    "one row": (
        NotImplementedError, "2 ranks would leave some of them nothing of weight",
        lambda m: m.column(rows=1, tp_mesh=m.tp),
    ),
    "a mesh twice": (
        RuntimeError, "weight is a DTensor .* already",
        lambda m: m.over_all().set_device_mesh(m.tp),
    ),
    "replicated input": (
        TypeError, r"given a DTensor placed as \(Replicate\(\),\)",
        lambda m: m.over_all()(DTensor.from_local(ones(4, 32), m.tp, (Replicate(),))),
    ),
    "transforms": (
        NotImplementedError, "torch.func's transforms are not supported",
        lambda m: sum_gradient(m.over_all(), ones(4, 32)),
    ),
    "quantized before": (
        RuntimeError, "weight is quantized already; call it before quantize_",
        lambda m: m.quantized().set_device_mesh(m.tp),
    ),
    "tokens that ranks do not divide": (
        ValueError, r"cuts dimension 0 of an output of shape \(3, '...'\) into 2 equal",
        lambda m: m.row()(ones(3, 16)),
    ),
    "no tokens": (
        ValueError, "has no such dimension of tokens", lambda m: m.row()(ones(16)),
    ),
    "a part of what FSDP2 gathers": (
        NotImplementedError, "in forward of the module that it was applied to",
        lambda m: m.row_within_fsdp()(ones(4, 16)),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@on_ranks(2)
def test_every_rank_refuses_what_a_linear_cannot_do(case):
    error, message, call = REFUSED[case]
    meshes = Meshes()
    with refused(error, message):
        call(meshes)


@on_ranks(2)
def test_a_linear_that_fsdp2_shards_is_no_error():
    meshes = Meshes()
    fully_shard(meshes.row(), mesh=meshes.mesh["dp"])

