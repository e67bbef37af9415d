"""Weights without columns or rows, as `nn.Linear(0, n)` and `nn.Linear(n, 0)` have them: what plain torch
does with them, quantized ones do, on one device and sharded."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist_helpers import device, full_mesh, on_ranks, shared_folder
from helpers import FORMATS, value
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import qshard

ops = torch.ops.qshard
RECIPES = {
    "float8_tensorwise": qshard.Float8CurrentScaling(),
    "float8_delayed": qshard.DelayedScaling(),
    "float8_rowwise": qshard.Float8RowwiseScaling(),
    "float8_blockwise": qshard.Float8BlockScaling(),
    "mxfp8": qshard.MXFP8BlockScaling(),
    "mxfp8_1x32": qshard.MXFP8BlockScaling(weight_block=(1, 32)),
    "nvfp4": qshard.NVFP4BlockScaling(),
    "nvfp4_1x16": qshard.NVFP4BlockScaling(disable_2d_quantization=True),
}
# features from layer to layer
CHAINS = {"no columns": (0, 32), "no rows": (32, 0), "neither": (0, 0), "through": (32, 0, 32)}
formats = pytest.mark.parametrize("format", FORMATS)
chains = pytest.mark.parametrize("chain", CHAINS)


def build(chain, format=None, keep_master=True, bias=True):
    torch.manual_seed(0)
    features = CHAINS[chain]
    model = nn.Sequential(*(nn.Linear(*pair, bias=bias) for pair in zip(features, features[1:])))
    model.to(device() if torch.distributed.is_initialized() else "cpu")
    if format is not None:
        qshard.quantize_(model, RECIPES[format], keep_master=keep_master)
        assert all(qshard.is_quantized(layer.weight) for layer in model)
    return model


def train(model, chain):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    outputs = []
    for step in range(3):
        x = torch.ones(5, CHAINS[chain][0], device=next(model.parameters()).device)
        out = model(x.requires_grad_())
        (out.sum() + x.sum()).backward()
        outputs += [out.detach().clone(), x.grad.clone()]
        for p in model.parameters():
            assert p.grad is not None and p.grad.shape == p.shape
        optimizer.step()
        optimizer.zero_grad()
    return outputs


def assert_as_plain(model, chain, bias):
    """No weight has an element: outputs and gradients are those of the biases."""
    for actual, expected in zip(train(model, chain), train(build(chain, bias=bias), chain)):
        assert torch.equal(actual.cpu(), expected.cpu())


@formats
@chains
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "codes"])
def test_on_one_device(format, chain, keep_master):
    for bias in (True, False):
        model = build(chain, format, keep_master, bias)
        assert_as_plain(model, chain, bias)
        for layer in model:
            weight = layer.weight.detach()
            again = pickle.loads(pickle.dumps(weight))
            assert again.shape == weight.shape and ops.format(again) == ops.format(weight)
            assert value(weight).shape == ops.dequantize(weight).shape == weight.shape
            ops.codes(weight), ops.scale_inv(weight)
            assert weight.clone().shape == weight.to(torch.bfloat16).shape == weight.shape


def shard(model):
    for layer in model:
        fully_shard(layer, mesh=full_mesh())
    return fully_shard(model, mesh=full_mesh())


def outcome(model, chain):
    """What training gives. FSDP2 reduces no gradients without elements: it says so, of plain ones too."""
    try:
        return [out.tolist() for out in train(model, chain)]
    except RuntimeError as error:
        return str(error).splitlines()[0]


@pytest.mark.pairwise
@formats
@chains
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "codes"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
# On GPUs FSDP2's split_with_sizes_copy divides by the size of what it gathered, which ends the
# process for plain weights without elements, too (torch 2.11, _fsdp_collectives.py).
@on_ranks(1, 2, devices=("cpu",))
def test_sharded_weights_without_columns_train_as_plain_ones(format, chain, keep_master, bias):
    model = shard(build(chain, format, keep_master, bias))
    plain = shard(build(chain, bias=bias))
    x = torch.ones(5, CHAINS[chain][0], device=device())
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    for layer in model:
        layer.unshard()
        assert ops.dequantize(layer.weight.detach()).shape == layer.weight.shape
        layer.reshard()
    other = shard(build(chain, format, keep_master, bias))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(0.5)
        qshard.flush(other)
    with shared_folder() as folder:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
        state = other.state_dict()
        dcp.load({"model": state}, checkpoint_id=folder)
        other.load_state_dict(state)
    for (name, a), b in zip(model.named_parameters(), other.parameters()):
        assert isinstance(a, DTensor) and a.shape == b.shape
        if not name.endswith("weight"):
            assert torch.equal(a.to_local(), b.to_local()), name
    assert torch.equal(other(x), plain(x))
    assert outcome(model, chain) == outcome(plain, chain)
