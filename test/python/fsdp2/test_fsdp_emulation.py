"""Small models train under emulate=True, sharded over two ranks."""

import pytest
import torch
from dist_helpers import device, full_mesh, on_worlds
from torch.distributed.fsdp import fully_shard

import qshard

BUDGET_S = 45
RECIPES = (
    qshard.Float8CurrentScaling(emulate=True),
    qshard.DelayedScaling(emulate=True),
    qshard.Float8BlockScaling(emulate=True),
    qshard.MXFP8BlockScaling(emulate=True),
    qshard.MXFP8BlockScaling(weight_block=(1, 32), emulate=True),
    qshard.NVFP4BlockScaling(emulate=True),
)
STEPS = 20
ops = torch.ops.qshard


def train(recipe, is_sharded):
    """Losses of the steps, the mean over ranks. Without shards a process takes the ranks' batches in turn."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 32))
    model.to(device())
    teacher = torch.randn(64, 32)
    qshard.quantize_(model, recipe)
    if is_sharded:
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=full_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        mean = torch.zeros((), device=device())
        for part in (rank,) if is_sharded else range(ranks):
            x = torch.randn(64, 64, generator=torch.Generator().manual_seed(100 * step + part))
            y = torch.tanh(x @ teacher / 8)
            torch.manual_seed(7 * step + part)
            loss = (model(x.to(device())) - y.to(device())).square().mean()
            (loss if is_sharded else loss / ranks).backward()
            mean += loss.detach() / ranks
        optimizer.step()
        if is_sharded:
            torch.distributed.all_reduce(mean)
        losses.append(mean.item())
    local = next(model.parameters())
    assert ops.format(local.to_local() if is_sharded else local) == recipe.format
    return losses, qshard.backend_report()


@on_worlds(2)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.format)
def test_trains_as_without_shards(world, recipe):
    (sharded, report), *_ = world.run(train, recipe, is_sharded=True)
    (whole, _), *_ = world.run(train, recipe, is_sharded=False)
    assert sharded[-1] < 0.6 * sharded[0]
    torch.testing.assert_close(torch.tensor(sharded), torch.tensor(whole), rtol=2e-2, atol=1e-3)
    assert f"{recipe.format} grad_weight: emulated GEMM" in report


@on_worlds(1, devices=("cuda",))
@pytest.mark.parametrize("recipe", RECIPES[:3], ids=lambda recipe: recipe.format)
def test_losses_are_those_of_the_gemms_of_codes(world, recipe, report):
    real = type(recipe)()
    ((emulated, _),) = world.run(train, recipe, is_sharded=True)
    ((of_codes, backends),) = world.run(train, real, is_sharded=True)
    if f"{real.format} forward: cuBLASLt FP8" not in backends:
        pytest.skip(f"needs a GPU with GEMMs of {real.format}")
    report.append(
        f"{real.format}: loss {emulated[0]:.5f}, after {STEPS} steps {emulated[-1]:.5f} emulated, "
        f"{of_codes[-1]:.5f} by cuBLASLt"
    )
    torch.testing.assert_close(torch.tensor(emulated), torch.tensor(of_codes), rtol=2e-2, atol=1e-3)
