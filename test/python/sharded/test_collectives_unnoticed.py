"""What collectives write where no dispatch key and no version counter tells: into values of state_dicts,
and after a flush that came before the wait."""

import pytest
import torch
import torch.distributed as dist
from dist_helpers import device, on_ranks
from helpers import assert_same, rounded, value, weight

import qshard

ops = torch.ops.qshard
FORMATS = ("float8_blockwise", "float8_tensorwise", "mxfp8", "nvfp4")


def broadcast(tensor, source, a):
    return dist.broadcast(tensor, source, **a)


def all_reduce_of_one(tensor, source, a):
    if dist.get_rank() != source:
        tensor.zero_()
    return dist.all_reduce(tensor, **a)


def send_and_receive(tensor, source, a):
    if dist.get_rank() == source:
        for rank in range(dist.get_world_size()):
            if rank != source:
                dist.send(tensor, rank)
    elif a:
        return dist.irecv(tensor, source)
    else:
        dist.recv(tensor, source)


def scatter_copies(tensor, source, a):
    copies = [tensor.clone() for _ in range(dist.get_world_size())]
    return dist.scatter(tensor, copies if dist.get_rank() == source else None, source, **a)


def functional(tensor, source, a):
    group = dist.distributed_c10d._get_default_group().group_name
    result = torch.ops._c10d_functional.broadcast_(tensor, source, group)
    torch.ops._c10d_functional.wait_tensor(result)


CASES = (broadcast, all_reduce_of_one, send_and_receive, scatter_copies, functional)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@on_ranks(2)
def test_values_of_state_dicts_that_collectives_write(is_async):
    a = {"async_op": True} if is_async else {}
    x = torch.randn(5, 48, device=device())
    for case in CASES:
        for recipe in (qshard.Float8BlockScaling(), qshard.Float8CurrentScaling(), qshard.NVFP4BlockScaling()):
            torch.manual_seed(dist.get_rank())
            layers = torch.nn.Linear(48, 64, bias=False), torch.nn.Linear(64, 48, bias=False)
            model = qshard.quantize_(torch.nn.Sequential(*layers).to(device()), recipe)
            model(x)  # codes are shown
            for name, received in model.state_dict().items():
                assert type(received) is torch.Tensor
                # .data has another version counter.
                work = case(received.data if name == "1.weight" else received, 1, a)
                if is_async and work is not None:
                    model(x)  # flushes
                    work.wait()
            torch.manual_seed(1)
            layers = torch.nn.Linear(48, 64, bias=False), torch.nn.Linear(64, 48, bias=False)
            want = qshard.quantize_(torch.nn.Sequential(*layers).to(device()), recipe)
            note = f"{case.__name__}, {recipe}"
            for got, expected in zip(model, want, strict=True):
                assert_same(got.weight, value(expected.weight), note)
            assert_same(model(x), want(x), note)


@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@on_ranks(2)
def test_what_arrives_after_a_flush_is_flushed_again(keep_master):
    for case in CASES[:4]:
        for fmt in FORMATS:
            of = [weight(640, 256, seed=rank).to(device()) for rank in range(2)]
            q = ops.quantize(of[dist.get_rank()], fmt, keep_master=keep_master)
            sent = value(ops.quantize(of[1], fmt, keep_master=keep_master))
            work = case(q, 1, {"async_op": True})
            if work is not None:
                ops.flush([q])
                work.wait()
                while not work.is_completed():
                    pass
            ops.flush([q])
            note = f"{case.__name__}, {fmt}"
            if keep_master:
                assert_same(q, sent, note)
            assert_same(ops.dequantize(q), rounded(sent, fmt), note)


def test_masters_that_are_gone_own_nothing():
    """Aliases outlive their tensors, and other tensors come to lie where those lay."""
    for _ in range(3000):
        alias = ops.master(ops.quantize(torch.ones(2, 16), "mxfp8", keep_master=True))
        assert torch.equal(alias, torch.ones(2, 16))
