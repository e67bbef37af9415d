"""What qshard.nn's modules over a tensor-parallel mesh hold, and what they refuse."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dist_helpers import device, full_mesh, on_ranks
from dist_models import RECIPES
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


@on_ranks(2)
def test_what_is_refused_is_refused_on_every_rank():
    mesh = full_mesh(1, 2, names=("dp", "tp"))
    tp, group = mesh["tp"], mesh["tp"].get_group()

    def linear(rows=48, cols=32, **kwargs):
        return qshard.nn.Linear(cols, rows, device=device(), **kwargs)

    with refused(NotImplementedError, "tp_size=2 without its ranks"):
        linear(parallel_mode="column", tp_size=2)
    with refused(ValueError, "tp_size=4, and the mesh or group has 2 ranks"):
        linear(parallel_mode="column", tp_size=4, tp_mesh=tp)
    with refused(ValueError, "tp_mesh and tp_group: leave one of the two out"):
        linear(parallel_mode="column", tp_mesh=tp, tp_group=group)
    with refused(ValueError, "must be a DeviceMesh of one dimension"):
        linear(parallel_mode="column", tp_mesh=mesh)
    with refused(ValueError, "weight_mesh must be a DeviceMesh of one dimension"):
        linear(parallel_mode="column", tp_mesh=tp, weight_mesh=mesh)
    with refused(ValueError, "does not hold the ranks"):
        linear(parallel_mode="column", tp_mesh=tp, weight_mesh=mesh["dp"])
    with refused(NotImplementedError, "fuse_wgrad_accumulation is not supported"):
        linear(parallel_mode="column", tp_mesh=tp, fuse_wgrad_accumulation=True)
    with refused(NotImplementedError, r"2 ranks would leave some of them nothing of weight"):
        linear(rows=1, parallel_mode="column", tp_mesh=tp)
    module = linear(parallel_mode="column", tp_mesh=tp, weight_mesh=mesh._flatten("all"))
    with refused(RuntimeError, "weight is a DTensor .* already"):
        module.set_device_mesh(tp)
    with refused(TypeError, r"given a DTensor placed as \(Replicate\(\),\)"):
        module(DTensor.from_local(torch.ones(4, 32, device=device()), tp, (Replicate(),)))
    with refused(NotImplementedError, "torch.func's transforms are not supported"):
        torch.func.grad(lambda x: module(x).sum())(torch.ones(4, 32, device=device()))
    module = linear(parallel_mode="column")
    qshard.quantize_(module, RECIPES["mxfp8"], filter_fn=lambda *_: True)
    with refused(RuntimeError, "weight is quantized already; call it before quantize_"):
        module.set_device_mesh(tp)
    row = linear(parallel_mode="row", sequence_parallel=True, tp_mesh=tp)
    with refused(ValueError, r"cuts dimension 0 of an output of shape \(3, '...'\) into 2 equal"):
        row(torch.randn(3, 16, device=device()))
    with refused(ValueError, "has no such dimension of tokens"):
        row(torch.randn(16, device=device()))
    fully_shard(row, mesh=mesh["dp"])
    other = linear(parallel_mode="row", tp_mesh=tp)
    fully_shard(nn.Sequential(other), mesh=mesh["dp"])
    with refused(NotImplementedError, "in forward of the module that it was applied to"):
        other(torch.randn(4, 16, device=device()))
