"""deepcopy, pickle, queues and processes: copies keep planes, placement and pending writes."""

import copy
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing
from helpers import (
    assert_same,
    is_quantized,
    loaded_as_weights,
    ops,
    rounded,
    value,
    weight,
)
from test_copies import COLS, ROWS, a_shard_with_a_pending_write, assert_same_state, keep_or_not

from qshard._runtime.classes import SavedTensor, TensorState


def repacked(q):
    *packed, state = TensorState(q).pack()
    return SavedTensor(*packed, q.shape, q.stride(), q.storage_offset(), q.dtype, state).read()


WAYS = {
    "deepcopy": copy.deepcopy,
    "torch.save": loaded_as_weights,
    "ForkingPickler": lambda q: ForkingPickler.loads(bytes(ForkingPickler.dumps(q))),
    "SavedTensor": repacked,
}


@pytest.mark.parametrize("way", WAYS)
@keep_or_not
def test_round_trips_keep_planes_placement_and_pending_writes(way, keep_master):
    whole = ops.quantize(weight(ROWS, COLS), "float8_blockwise", keep_master=keep_master)
    written = whole.clone()
    written.mul_(1.1)
    shard = a_shard_with_a_pending_write(keep_master)
    padded = whole.new_zeros(7, COLS)
    padded[:3].copy_(whole[-3:])
    experts = ops.quantize(weight(3, 20, 24), "float8_tensorwise", keep_master=keep_master)
    window, columns = whole[130:140], whole[:, 3:9]
    half = ops.quantize(weight(6, 8), "float8_tensorwise", keep_master=keep_master).half()
    empty = ops.quantize(torch.zeros(0, 16), "float8_blockwise", keep_master=keep_master)
    for q in (whole, written, shard, padded, experts, window, columns, half, empty):
        pending = TensorState(q).has_pending_update()
        again = WAYS[way](q)
        assert is_quantized(again) and again.data_ptr is not q.data_ptr
        assert_same(again, q)
        assert_same_state(again, q)
        assert TensorState(again).has_pending_update() == pending
        if again.numel() and way != "ForkingPickler":  # which shares memory, as of plain tensors
            again.zero_()
            assert value(q).any()


def test_modules_and_parameters():
    layer = torch.nn.Linear(32, 20)
    layer.weight = torch.nn.Parameter(
        ops.quantize(layer.weight, "float8_blockwise", keep_master=True)
    )
    clone = copy.deepcopy(layer)
    assert type(clone.weight) is torch.nn.Parameter and is_quantized(clone.weight)
    assert_same(clone.weight, layer.weight)
    tied = copy.deepcopy([layer.weight, layer.weight])
    assert tied[0] is tied[1]

    state_dict = loaded_as_weights(layer.state_dict())
    assert_same(state_dict["weight"], layer.weight)
    clone.weight.detach().zero_()
    clone.load_state_dict(state_dict)
    assert_same(clone.weight, layer.weight)
    clone.load_state_dict({"weight": weight(20, 32), "bias": torch.zeros(20)})
    assert is_quantized(clone.weight)
    assert_same(clone.weight, weight(20, 32))
    parameter = ForkingPickler.loads(bytes(ForkingPickler.dumps(layer.weight)))
    assert type(parameter) is torch.nn.Parameter and parameter.requires_grad


def child(inbox, outbox):
    q = inbox.get()
    outbox.put((type(q).__name__, bool(ops.is_quantized(q)), q.sum().item()))
    outbox.put(q.mul_(2))
    inbox.get()  # what it sent lives in its memory


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_queues_share_memory_between_processes(method):
    """As plain tensors do: what the child writes is the parent's value too."""
    context = torch.multiprocessing.get_context(method)
    inbox, outbox = context.Queue(), context.Queue()
    q = ops.quantize(weight(20, 32), "float8_blockwise", keep_master=True)
    before = value(q)
    process = context.Process(target=child, args=(inbox, outbox), daemon=True)
    process.start()
    inbox.put(q)
    assert outbox.get(timeout=60) == ("Tensor", True, before.sum().item())
    assert_same(outbox.get(timeout=60), before * 2)
    inbox.put(None)
    process.join(60)
    assert_same(q, before * 2)
    ops._mark_written(q)  # this process was not told
    assert_same(ops.dequantize(q), rounded(before * 2, "float8_blockwise"))


def spawned(q, outbox):
    outbox.put((type(q).__name__, ops.dequantize(q.detach()).sum().item()))


@keep_or_not
def test_spawned_processes_take_parameters(keep_master):
    context = torch.multiprocessing.get_context("spawn")
    q = torch.nn.Parameter(ops.quantize(weight(20, 32), "nvfp4", keep_master=keep_master))
    outbox = context.Queue()
    process = context.Process(target=spawned, args=(q, outbox), daemon=True)
    process.start()
    assert outbox.get(timeout=60) == ("Parameter", ops.dequantize(q.detach()).sum().item())
    process.join(60)


@keep_or_not
def test_share_memory_keeps_values_and_writes(keep_master):
    q = ops.quantize(weight(20, 32), "float8_blockwise", keep_master=keep_master)
    before = value(q)
    assert q.share_memory_() is q and q.is_shared()
    assert_same(q, before)
    q.mul_(2)
    assert_same(q, before * 2)
