"""Keys of stochastic rounding: weights of one model have noise of their own, the same on any mesh."""

import pytest
import torch
from dist_helpers import World, device, full_mesh, on_worlds
from models.shared_scales import step
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import qshard

RECIPES = {"nvfp4": qshard.NVFP4BlockScaling(), "blockwise": qshard.Float8BlockScaling()}


def build(recipe, by_blocks):
    """Layers of the same values, quantized by a call for each, in which all have one name."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(48, 100, bias=False)) for _ in range(3)))
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    layers.to(device())
    for part in layers if by_blocks else [layers]:
        qshard.quantize_(part, RECIPES[recipe], keep_master=False, stochastic_rounding=True)
    return layers


class SameGradients(torch.optim.SGD):
    """Steps all parameters by the first one's gradient."""

    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        for param in params[1:]:
            param.grad = params[0].grad.clone()
        return super().step(closure)


def values(layers):
    weights = [layer[0].weight.detach() for layer in layers]
    return [(w.full_tensor() if isinstance(w, DTensor) else w * 1).cpu() for w in weights]


def train(recipe, sharded, by_blocks=True):
    layers = build(recipe, by_blocks)
    if sharded:
        for layer in layers:
            fully_shard(layer, mesh=full_mesh())
        fully_shard(layers, mesh=full_mesh())
    optimizer = SameGradients(layers.parameters(), lr=1e-3)
    seen = []
    for number in range(2):
        step(layers, optimizer, number)
        seen.append(values(layers))
    return seen


@pytest.mark.parametrize("recipe", RECIPES)
@on_worlds(1)
def test_layers_quantized_one_by_one_round_by_noise_of_their_own(world, recipe):
    seen, again = (world.run(train, recipe, False)[0] for _ in range(2))
    for first, *others in seen:
        for other in others:
            assert not torch.equal(first, other)
        assert not torch.equal(*others)
    together = world.run(train, recipe, False, by_blocks=False)[0]
    for a, b, c in zip(seen, again, together, strict=True):
        assert all(map(torch.equal, a, b))
        assert not torch.equal(a[0], c[0])  # of another name


@pytest.mark.parametrize("recipe", RECIPES)
@on_worlds(2, 3)
def test_noise_is_the_same_on_any_mesh(world, recipe):
    want = World(world.device, 1).run(train, recipe, False)[0]
    for seen in world.run(train, recipe, True):
        for a, b in zip(seen, want, strict=True):
            assert all(map(torch.equal, a, b))
