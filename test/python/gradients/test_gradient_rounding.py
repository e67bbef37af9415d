"""Stochastic rounding of gradients in few bits: its noise, and the count that is saved."""

import copy

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist_helpers import device, full_mesh, gather_objects, on_ranks, shared_folder
from models.training import adamw, train
from reference import gradient_message, stochastic
from test_gradient_reduction import SUM, backward, plain_model
from torch.distributed.fsdp import fully_shard

import qshard
from qshard.gradients import QuantizedReduceScatter

BUDGET_S = 45


@on_ranks(2, 3)
def test_stochastic_rounding_is_right_on_average():
    """Same seed, same bits; the mean over many steps is the gradient; each rank has noise of its own."""
    rank, world, n = dist.get_rank(), dist.get_world_size(), 4100
    state = torch.tensor([5, 6, 7], dtype=torch.int32, device=device())
    x = torch.randn(world * n, generator=torch.Generator().manual_seed(rank)).to(device())
    reduce = QuantizedReduceScatter("nvfp4", lambda: state)
    out = torch.empty(n, device=device())
    reduce(out, x.clone(), dist.group.WORLD, SUM)
    assert state.tolist() == [5, 6, 8]
    messages = []
    for r, theirs in enumerate(gather_objects(x.cpu())):
        first = (r * world + rank) * -(-n // 16) * 16
        noise = gradient_message.noise(stochastic.key_of(5, 6), 7, first, n)
        messages.append(gradient_message.encode(theirs.view(world, n)[rank], "nvfp4", noise))
    want = gradient_message.total(messages, "nvfp4", n, 1.0, torch.float32)
    assert torch.equal(out.cpu(), want)
    mean = torch.zeros_like(out)
    for _ in range(64):
        reduce(out, x.clone(), dist.group.WORLD, SUM)
        mean += out / 64
    exact = sum(theirs.view(world, n)[rank] for theirs in gather_objects(x.cpu())).to(device())
    error, one = ((v - exact).norm() / exact.norm() for v in (mean, out))
    assert error < 0.2 * one  # 1/8, if they are independent


@on_ranks(2)
def test_the_count_is_saved_and_resumed():
    def trained(steps, seed=3):
        torch.manual_seed(seed)
        model = plain_model()
        torch.manual_seed(seed)
        qshard.reduce_gradients_(model, "nvfp4", rounding="stochastic")
        return model, adamw(model)

    straight, optimizer = trained(0)
    losses = train(straight, optimizer, steps=4)
    first, optimizer = trained(0)
    train(first, optimizer, steps=2)
    counts = [b[2].item() for name, b in first.named_buffers() if name.endswith("gradient_rounding")]
    assert counts == [2, 2, 2]
    with shared_folder() as folder:
        saved = {"model": first.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(saved, checkpoint_id=folder)
        again, fresh = trained(0, seed=4)  # keys are loaded, too
        train(again, fresh, steps=1)
        state = {"model": again.state_dict(), "optimizer": fresh.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        again.load_state_dict(state["model"])
        fresh.load_state_dict(state["optimizer"])
    assert train(again, fresh, steps=2, first_step=2) == losses[2:]
    # A checkpoint without a count loads, and so does one that is assigned.
    with shared_folder() as folder:
        dcp.save({"model": plain_model().state_dict()}, checkpoint_id=folder)
        dcp.load({"model": first.state_dict()}, checkpoint_id=folder)
    state = {k: v for k, v in first.state_dict().items() if "rounding" not in k}
    first.load_state_dict(state)
    state = copy.copy(first.state_dict())
    state["gradient_rounding"] = torch.tensor([1, 2, 3], dtype=torch.int32, device=device())
    first.load_state_dict(state, assign=True)
    assert first.state_dict()["gradient_rounding"].tolist() == [1, 2, 3]
    backward(first)
    assert first.state_dict()["gradient_rounding"].tolist() == [1, 2, 4]


@on_ranks(2)
def test_modules_of_one_reduction_have_one_count():
    layers = [torch.nn.Linear(32, 32, bias=False, device=device()) for _ in range(2)]
    model = torch.nn.Sequential(*layers)
    fully_shard(layers, mesh=full_mesh())
    fully_shard(model, mesh=full_mesh())
    qshard.reduce_gradients_(model, "nvfp4", rounding="stochastic")
    model(torch.ones(2, 32, device=device())).sum().backward()
    assert [b[2].item() for b in model.buffers()] == [1]
    qshard.reduce_gradients_(model, None)
    assert not list(model.buffers())
