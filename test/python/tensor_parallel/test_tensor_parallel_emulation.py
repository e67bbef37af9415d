"""Under tensor parallelism linears emulate the GEMMs of codes of their parts."""

import pytest
import torch
from dist_helpers import full_mesh, on_worlds
from models.tensor_parallel import initialise, mlp
from test_tensor_parallel_styles import replicated, sequence_parallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import qshard
from qshard.formats import info_of

RECIPES = (
    qshard.Float8CurrentScaling(emulate=True),
    qshard.Float8BlockScaling(emulate=True),
    qshard.MXFP8BlockScaling(emulate=True),
    qshard.NVFP4BlockScaling(emulate=True),
)
DIM, HIDDEN, STEPS = 64, 128, 5


def losses_of(recipe, plan):
    """The loss of each step, and the report. A rank without a plan trains the whole model."""
    model = initialise(mlp(DIM, HIDDEN))
    mesh = full_mesh(names=("tp",))
    if plan is not None:
        parallelize_module(model, mesh, plan())
    qshard.quantize_(model, recipe, **({} if plan is None else {"tp_mesh": mesh}))
    local = model.up.weight if plan is None else model.up.weight.to_local()
    assert torch.ops.qshard.format(local) == recipe.format
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(2, 32, DIM, generator=torch.Generator().manual_seed(step))
        if plan is sequence_parallel:
            x = x.chunk(mesh.size(), 1)[mesh.get_local_rank()].contiguous()
        torch.manual_seed(step)
        loss = model(x).square().mean()
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, qshard.backend_report()


@on_worlds(2, devices=("cpu",))
@pytest.mark.parametrize("plan", [replicated, sequence_parallel])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.format)
def test_trains_as_on_one_device(world, plan, recipe):
    (parallel, report), *_ = world.run(losses_of, recipe, plan)
    (alone, _), *_ = world.run(losses_of, recipe, None)
    tolerance = 0.1 if info_of(recipe.format).code_bits == 4 else 2e-2  # parts have noise and codes of their own
    torch.testing.assert_close(torch.tensor(parallel), torch.tensor(alone), rtol=tolerance, atol=0)
    for direction in ("forward", "grad_input", "grad_weight"):
        assert f"{recipe.format} {direction}: emulated GEMM" in report
