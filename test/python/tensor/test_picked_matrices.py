"""q[ids] and index_select(0) of a stack: whole matrices keep the kind, as those that q[3] shows."""

import pytest
import torch
from dist_helpers import device, on_ranks
from helpers import FORMATS, assert_same, fit, has_two_images, is_quantized, ops, value, weight
from torch import nn
from torch.distributed.fsdp import fully_shard

import qshard
from qshard._runtime.classes import TensorState

formats = pytest.mark.parametrize("fmt", FORMATS)
keep_or_not = pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
DEVICES = pytest.mark.parametrize("on", ["cpu", "cuda"])
EXPERTS, COLS = 5, 47
INDICES = {
    "list": [3, 0, 3],
    "negative": [-1, 0],
    "none": [],
    "mask": [True, False, False, True, True],
    "table": [[0, 1, 4], [2, 2, 2]],
    "number": 2,
}


def stack(fmt, keep_master=False, on="cpu", experts=EXPERTS, rows=33):
    """Matrices of which each is four times as large as the one before."""
    if on == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    values = weight(experts, fit(fmt, rows), COLS) * 4.0 ** torch.arange(experts).view(-1, 1, 1)
    return ops.quantize(values.to(on), fmt, keep_master=keep_master)


def as_index(numbers, like, dtype=None):
    index = torch.tensor(numbers, device=like.device)
    return index.to(dtype or (torch.long if index.dtype != torch.bool else torch.bool))


def assert_picked(picked, q, index):
    assert is_quantized(picked) and TensorState(picked).keeps_master() == TensorState(q).keeps_master()
    assert_same(ops.dequantize(picked), ops.dequantize(q)[index])
    assert_same(value(picked), value(q)[index])


@pytest.mark.parametrize("numbers", INDICES.values(), ids=INDICES)
@DEVICES
@keep_or_not
@formats
def test_matrices_by_index(fmt, keep_master, on, numbers):
    q = stack(fmt, keep_master, on)
    index = as_index(numbers, q)
    assert_picked(q[index], q, index)
    if index.dtype != torch.bool:
        assert_picked(q[as_index(numbers, q, torch.int32)], q, index)
    if index.dim() == 1 and index.dtype == torch.long and (index >= 0).all():
        assert_picked(q.index_select(0, index), q, index)
        assert_picked(q.index_select(-3, index.int()), q, index)


@DEVICES
@keep_or_not
@formats
def test_products_read_codes(fmt, keep_master, on):
    q = stack(fmt, keep_master, on)
    index = as_index([4, 1, 4], q)
    x = weight(3, 2, COLS, seed=1).to(on)
    picked = q[index].transpose(1, 2)
    if not has_two_images(fmt):
        assert_same(x @ picked, x @ ops.dequantize(q)[index].transpose(1, 2))
    # a product with the identity is exact on every device: it shows what products read
    rows = torch.eye(COLS, device=on)
    seen = torch.stack([(rows @ q[i].t()).t().contiguous() for i in index]).transpose(1, 2)
    assert_same(x @ picked, x @ seen)


@DEVICES
@formats
def test_views_of_a_stack(fmt, on):
    q = stack(fmt, on=on)
    index = as_index([2, 0], q)
    assert_picked(q[1:4][index], q[1:4], index)
    transposed = q.transpose(1, 2)
    assert_picked(transposed[index], transposed, index)
    assert_picked(q[None].expand(1, *q.shape)[0][index], q, index)
    layers = stack(fmt, on=on, experts=6).view(3, 2, -1, COLS)
    assert_picked(layers[index], layers, index)


@DEVICES
@keep_or_not
@formats
def test_picked_matrices_are_tensors_of_their_own(fmt, keep_master, on):
    q = stack(fmt, keep_master, on)
    before, index = value(q).clone(), as_index([1, 1], q)
    picked = q[index]
    picked[0].mul_(3)
    ops.flush([picked])
    assert_same(value(q), before)
    expected = before[index]
    expected[0] *= 3
    if keep_master:
        assert_same(value(picked), expected)
    # An order of one's own is written back, with the scales that go with it.
    order = as_index([4, 3, 2, 1, 0], q)
    codes = ops.dequantize(q)[order]
    with torch.no_grad():
        q.copy_(q[order])
    ops.flush([q])
    assert_same(value(q), before[order])
    if fmt != "float8_delayed":
        assert_same(ops.dequantize(q), codes)


@DEVICES
@keep_or_not
@formats
def test_matrices_of_a_written_stack(fmt, keep_master, on):
    q = stack(fmt, keep_master, on)
    q.mul_(1.3)
    written = value(q).clone()
    picked = q[as_index([2, 0], q)]
    if keep_master:
        assert_same(value(picked), written[[2, 0]])
    ops.flush([q, picked])
    assert_same(ops.dequantize(picked), ops.dequantize(q)[[2, 0]])


@DEVICES
@formats
def test_gradients_are_plain(fmt, on):
    q = nn.Parameter(stack(fmt, True, on))
    twin = nn.Parameter(value(q).clone())
    index, x = as_index([3, 1, 3], q), weight(3, 2, COLS, seed=1).to(on)
    for weights in (q, twin):
        (x @ weights[index].transpose(1, 2)).sum().backward()
    assert not is_quantized(q.grad)
    assert_same(q.grad, twin.grad)


@formats
def test_other_indexing_reads_values(fmt):
    q = stack(fmt, keep_master=True)
    v, two = value(q), torch.tensor([1, 0])
    for read in (
        lambda t: t[:, two],
        lambda t: t[two, 1],
        lambda t: t[two, :, two],
        lambda t: t[0][two],
        lambda t: t.index_select(1, two),
        lambda t: t.index_select(2, two),
        lambda t: t[t > 0],
        lambda t: t[:, ::2][two],
        lambda t: t[..., 1:][two],
    ):
        assert not is_quantized(read(q))
        assert_same(read(q), read(v))


@formats
def test_errors_are_those_of_plain_tensors(fmt):
    q = stack(fmt)
    for wrong in (
        lambda t: t[torch.tensor([EXPERTS])],
        lambda t: t[torch.tensor([-EXPERTS - 1])],
        lambda t: t[torch.tensor([True])],
        lambda t: t[torch.tensor([0.5])],
        lambda t: t.index_select(0, torch.tensor([[0]])),
        lambda t: t.index_select(0, torch.tensor([0.5])),
        lambda t: t.index_select(3, torch.tensor([0])),
    ):
        with pytest.raises((IndexError, RuntimeError)) as plain:
            wrong(value(q))
        with pytest.raises(plain.type):
            wrong(q)


class Routed(nn.Module):
    """Each token meets the expert that its number names, as transformers' batched_mm does it."""

    def __init__(self, fmt):
        super().__init__()
        self.up = nn.Parameter(weight(4, 64, 32))

    def forward(self, x, ids):
        return (self.up[ids] @ x.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("fmt", ["float8_tensorwise", "float8_blockwise", "mxfp8", "nvfp4"])
@on_ranks(2)
def test_one_process_and_fsdp2_multiply_the_same(fmt):
    x, ids = weight(6, 32, seed=1).to(device()), torch.tensor([0, 3, 1, 1, 2, 3], device=device())
    models = [Routed(fmt).to(device()) for _ in range(2)]
    for model in models:
        qshard.quantize_(model, fmt, parameter_fn=lambda parameter, name: parameter.dim() == 3)
    fully_shard(models[1])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(3):
        outputs = [model(x, ids) for model in models]
        assert_same(outputs[1], outputs[0])
        for output, optimizer in zip(outputs, optimizers):
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    codes = ops.dequantize(models[0].up.detach())[ids]
    assert_same(models[0](x, ids), (codes @ x.unsqueeze(-1)).squeeze(-1))
