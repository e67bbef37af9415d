"""A gather reads a flushed image whatever streams and events the user hands over.

Each test lets the stream that writes and flushes sleep first, so that a stream that does not wait reads old
codes, and compares with the same model stepped on one stream.
"""

import pytest
import torch
import torch.distributed as dist
from dist_helpers import device, on_ranks
from helpers import ops
from models.blocks import WIDTH
from models.formats import RECIPES as KINDS
from models.fsdp2 import build, shard
from models.training import adamw, batch, loss_of
from models.weights import local, quantized_parameters
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

import qshard

SLEEP = 50_000_000  # cycles: some 30 ms
RECIPES = ("float8_blockwise", "mix-1")
STEPS = 3


def sleep():
    torch.cuda._sleep(SLEEP)


def losses_of(model, step):
    """Losses of STEPS steps and a last forward; nothing waits for the device in between."""
    inputs = [batch(i) for i in range(STEPS + 1)]
    losses = []
    for i, x in enumerate(inputs):
        loss = loss_of(model, x)
        losses.append(loss.detach())
        if i < STEPS:
            loss.backward()
            step()
    torch.cuda.synchronize()
    return [loss.item() for loss in losses]


def on_one_stream(model):
    optimizer = adamw(model, fused=True)

    def step():
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    return losses_of(model, step)


def with_event_of_the_optimizers_own(model, before_step=lambda: None):
    """FSDP2 waits for that event and nothing else; torch runs global hooks, and so the flush, after
    the optimizer's own."""
    optimizer = adamw(model, fused=True)

    def hand_over(*_):
        event = torch.cuda.Event()
        event.record()
        model.set_post_optim_event(event)
        sleep()  # the flush comes later still

    optimizer.register_step_post_hook(hand_over)

    def step():
        before_step()
        optimizer.step()
        optimizer.zero_grad()

    return losses_of(model, step)


def with_custom_all_gather_streams(model):
    """New ones at every step, in place of those that FSDP2 made at its first forward."""

    def replace_streams():
        context = model._get_fsdp_state()._comm_ctx
        context.all_gather_copy_in_stream = torch.cuda.Stream()
        context.all_gather_stream = torch.cuda.Stream()

    return with_event_of_the_optimizers_own(model, replace_streams)


class GatherOnAStreamOfItsOwn(AllGather):
    def __init__(self):
        self.stream = torch.cuda.Stream()

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        callers = torch.cuda.current_stream()
        self.stream.wait_stream(callers)
        with torch.cuda.stream(self.stream):
            dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
        callers.wait_stream(self.stream)


def with_a_custom_all_gather(model):
    for module in (*model.blocks, model):
        module.set_custom_all_gather(GatherOnAStreamOfItsOwn())
    return with_event_of_the_optimizers_own(model)


def with_a_side_stream(model):
    optimizer, side = adamw(model, fused=True), torch.cuda.Stream()

    def step():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            sleep()
            optimizer.step()
            event = torch.cuda.Event()
            event.record()
        model.set_post_optim_event(event)
        # The parameters that are not quantized are read in forward on this stream.
        torch.cuda.current_stream().wait_stream(side)
        optimizer.zero_grad()

    return losses_of(model, step)


def in_backward(model):
    optimizers = {}

    def step_now(parameter):
        sleep()
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        optimizers[parameter] = torch.optim.AdamW([parameter], lr=1e-2, fused=True)
        parameter.register_post_accumulate_grad_hook(step_now)
    return losses_of(model, lambda: None)


def in_backward_by_block(model):
    """A block's optimizer steps when the last of the block's gradients has come."""

    def step_when_all_have_come(parameters):
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
        missing = set(parameters)

        def came(parameter):
            missing.remove(parameter)
            if missing:
                return
            sleep()
            optimizer.step()
            optimizer.zero_grad()
            missing.update(parameters)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(came)

    for block in (*model.blocks, model.head):
        step_when_all_have_come(list(block.parameters()))
    return losses_of(model, lambda: None)


def with_asynchronous_unshards(model):
    for name in ("set_unshard_async_op", "_set_unshard_async_op"):  # by torch's version
        if hasattr(model, name):
            getattr(model, name)(True)
    optimizer = adamw(model, fused=True)

    def step():
        sleep()
        optimizer.step()
        optimizer.zero_grad()
        for module in model.modules():
            if hasattr(module, "unshard"):
                module.unshard(async_op=True)

    return losses_of(model, step)


def written_on_a_side_stream(model):
    """Not by an optimizer: the gather itself flushes, after the write."""
    side = torch.cuda.Stream()
    losses, x = on_one_stream(model), batch(0)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        sleep()
        for parameter in quantized_parameters(model).values():
            local(parameter).mul_(1.5)
    loss = loss_of(model, x)
    torch.cuda.synchronize()
    return [*losses, loss.item()]


def written_on_one_stream(model):
    losses = on_one_stream(model)
    with torch.no_grad():
        for parameter in quantized_parameters(model).values():
            local(parameter).mul_(1.5)
    torch.cuda.synchronize()
    return [*losses, loss_of(model, batch(0)).item()]


WAYS = {
    "post_optim_event": (with_event_of_the_optimizers_own, on_one_stream),
    "side stream": (with_a_side_stream, on_one_stream),
    "custom all-gather streams": (with_custom_all_gather_streams, on_one_stream),
    "custom all-gather": (with_a_custom_all_gather, on_one_stream),
    "optimizer in backward": (in_backward, on_one_stream),
    "optimizer in backward by block": (in_backward_by_block, on_one_stream),
    "async unshard": (with_asynchronous_unshards, on_one_stream),
    "write on a side stream": (written_on_a_side_stream, written_on_one_stream),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("format", RECIPES)
@on_ranks(1, 2, devices=("cuda",))
def test_gathers_read_flushed_images(format, way):
    run, expected = WAYS[way]
    losses = [way(build(format)) for way in (run, expected)]
    assert losses[0] == losses[1], losses


@on_ranks(1, devices=("cuda",))
def test_graph_around_a_step():
    """A captured step's flush leaves no event behind; a replay is waited for by its stream."""
    q = torch.nn.Parameter(
        ops.quantize(torch.randn(256, 128, device=device()), "float8_blockwise", keep_master=True)
    )
    optimizer = torch.optim.AdamW([q], lr=torch.tensor(1e-2, device=device()), fused=True,
                                  capturable=True)
    q.grad = torch.randn(256, 128, device=device())
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        optimizer.step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sleep()
        optimizer.step()
    for _ in range(2):
        graph.replay()
    ops._mark_written(q.detach())
    expected = ops.quantize(ops.master(q.detach()).clone(), "float8_blockwise")
    ops.flush([q.detach()])
    assert torch.equal(ops.dequantize(q.detach()), ops.dequantize(expected))


def quantized_only(format):
    """Nothing in it is plain: of plain weights FSDP2 would read those before the step."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)]
    return shard(qshard.quantize_(nn.Sequential(*layers).to(device()), KINDS[format]))


@pytest.mark.parametrize("format", ("float8_tensorwise", "float8_blockwise", "nvfp4"))
@on_ranks(1, devices=("cuda",))
def test_a_gather_sees_the_flush_of_a_replay(format):
    """Neither FSDP2 nor its streams wait for the replay: the gather does."""
    losses = []
    for is_captured in (True, False):
        model = quantized_only(format)
        optimizer = adamw(model, fused=True, capturable=True)
        loss_of(model, batch(0)).backward()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            optimizer.step()
        torch.cuda.synchronize()
        x, step, graph = batch(1), optimizer.step, torch.cuda.CUDAGraph()
        if is_captured:
            with torch.cuda.graph(graph):
                sleep()
                optimizer.step()
            step = graph.replay
        # A step outside of the graph, too: replays come after its flush.
        for step in (step, step, optimizer.step, step):
            before = torch.cuda.Event()
            before.record()
            step()
            if is_captured:
                model.set_post_optim_event(before)
            with torch.no_grad():
                losses.append(loss_of(model, x).item())
            model.reshard()  # FSDP2 keeps the outermost module's weights gathered
    assert losses[:4] == losses[4:], losses
    assert len(set(losses)) == 4, losses
