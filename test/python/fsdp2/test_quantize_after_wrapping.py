"""quantize_ after fully_shard, and what code finds of DTensors with quantized local tensors."""

import pytest
import torch
from dist_helpers import device, full_mesh, on_ranks
from helpers import assert_same
from models.weights import local
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import qshard

BUDGET_S = 45
ops = torch.ops.qshard
RECIPE = qshard.Float8BlockScaling()


class Renamed(nn.Linear):
    """Keeps its weight under another name in checkpoints, and counts loads."""

    loads = 0

    def load_state_dict(self, state_dict, *args, **kwargs):
        type(self).loads += 1
        own = {"weight": state_dict["kernel"], "bias": state_dict["bias"]}
        return super().load_state_dict(own, *args, **kwargs)


def sharded(rows=3, kind=nn.Linear, **kwargs):
    torch.manual_seed(0)
    model = nn.Sequential(kind(32, rows), nn.Linear(rows, 32)).to(device())
    return fully_shard(model, mesh=full_mesh(), **kwargs)


@on_ranks(1, 2, 4)
def test_no_load_of_the_users_is_called():
    model = qshard.quantize_(sharded(kind=Renamed), RECIPE)
    assert Renamed.loads == 0
    view = local(model[0].weight).detach()
    before = (view + 0).clone()
    model(torch.randn(4, 32, device=device())).sum().backward()
    model[0].weight.detach().mul_(2)  # padded or not, the memory is the same
    assert_same(view + 0, before * 2)


@on_ranks(1, 2)
def test_accessors_take_dtensors():
    model = qshard.quantize_(sharded(rows=64), "nvfp4")
    weight, own = model[0].weight, local(model[0].weight).detach()
    assert isinstance(weight, DTensor) and qshard.ops.is_quantized(weight)
    assert qshard.ops.format(weight) == "nvfp4"
    for name in ("codes", "scale_inv", "tensor_scale_inv", "master"):
        found = getattr(qshard.ops, name)(weight)
        assert type(found) is torch.Tensor
        assert_same(found.view(torch.uint8), getattr(ops, name)(own).view(torch.uint8))
    with pytest.raises(TypeError, match="qshard::dequantize: .*got a DTensor"):
        qshard.ops.dequantize(weight)
    assert not qshard.ops.is_quantized(model[0].bias)
    for name in ("format", "codes", "master"):
        with pytest.raises(TypeError, match=f"qshard::{name}: .*got a DTensor of plain values"):
            getattr(qshard.ops, name)(model[0].bias)
