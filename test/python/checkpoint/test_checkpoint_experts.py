"""DCP's checkpoints of experts, with the state of their optimizer, on other meshes than those that saved them."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist_helpers import device, full_mesh, on_ranks, shared_folder
from models.formats import DELAYED, RECIPES
from models.tensor_parallel import give_gradient, local_part
from models.weights import local
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import qshard

EXPERTS = 8
MESHES = [(1, 4), (2, 2), (4, 1)]  # (efsdp, ep): FSDP2 alone last


class Experts(nn.Module):
    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in (("up", (EXPERTS, 64, 32)), ("down", (EXPERTS, 32, 64))):
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator).to(device())))


def built(shape, format, seed):
    """On a mesh (efsdp, ep); None: a plain model that each rank has whole."""
    model = Experts(seed)
    if shape is not None:
        mesh = full_mesh(*shape, names=("efsdp", "ep"))
        if shape[1] > 1:
            for name, stack in list(model.named_parameters()):
                setattr(model, name, nn.Parameter(distribute_tensor(stack.detach(), mesh["ep"], [Shard(0)])))
        options = {"parameter_fn": lambda *_: True, "persistent_state": False}
        qshard.quantize_(model, RECIPES[format], tp_mesh=mesh["ep"], **options)
        fully_shard(model, mesh=mesh["efsdp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)


def step(model, optimizer, number):
    for seed, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(10 * number + seed)
        gradient = torch.randn(parameter.shape, generator=generator).to(device())
        give_gradient(parameter, gradient)
    optimizer.step()


def assert_values(model, plain):
    for parameter, value in zip(model.parameters(), plain.parameters(), strict=True):
        value = local_part(value.detach(), parameter) if isinstance(parameter, DTensor) else value
        assert torch.equal(local(parameter).detach() * 1, value)


def save(model, optimizer, folder):
    parts = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), parts)), checkpoint_id=folder)


def load(model, optimizer, folder):
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


@pytest.mark.each_value
@pytest.mark.parametrize("source", MESHES)
@pytest.mark.parametrize("format", ["float8_blockwise", DELAYED, "mxfp8_1x32"])
@on_ranks(4)
def test_experts_and_their_optimizer_resume_on_other_meshes(format, source):
    plain = built(None, None, 0)
    model = built(source, format, 0)
    for number in range(2):
        step(*plain, number)
        step(*model, number)
    assert_values(model[0], plain[0])
    with shared_folder() as folder:
        save(*model, folder / "experts")
        step(*plain, 2)
        for target in (*MESHES, None):
            other = built(target, format, 1)
            load(*other, folder / "experts")
            step(*other, 2)
            assert_values(other[0], plain[0])
            assert all(map(qshard.is_quantized, other[0].parameters())) == (target is not None)
