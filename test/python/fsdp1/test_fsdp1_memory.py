"""Peak bytes of a rank in a step under FSDP1: with weights quantized at each use, no more than of the
same model without qshard.

In a process group that sends nothing: what gloo copies, and when its threads let go of it, is not
measured. Every allocation is, of FSDP1, autograd and operators alike.
"""

import contextlib
import gc

import pytest
import torch
import torch.distributed as dist
from helpers import ops
from models.blocks import Model
from models.formats import FORMATS
from models.fsdp1 import BF16, build_fsdp1, wrap
from models.training import adamw, batch, loss_of
from torch.testing._internal.distributed.fake_pg import FakeStore

from qshard._runtime.classes import TensorState

ROWS = 1024  # weights outweigh activations
STATE = 2048  # bytes of the amaxes, scales and histories of a model


@contextlib.contextmanager
def silent_world(size):
    dist.init_process_group("fake", rank=1, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def peak_bytes(function):
    """Allocated by it at one moment, beyond what there was."""
    gc.collect()
    gc.disable()  # what others left must not be freed in between
    try:
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(profile_memory=True, activities=cpu) as profiler:
            function()
    finally:
        gc.enable()
    level = peak = 0
    events = profiler.profiler.kineto_results.events()
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    return peak


def peaks(model):
    """Peaks of forward and backward, of an optimizer step, and of a forward alone, in a second step."""
    optimizer = adamw(model)

    def forward_and_backward():
        loss_of(model, batch(0)).backward()

    def forward():
        with torch.no_grad():
            model(batch(0))

    # Under the profiler, too: it knows of no block that it has not seen come, and takes one at the address of
    # another that went unseen for that.
    peak_bytes(forward_and_backward)
    peak_bytes(optimizer.step)
    optimizer.zero_grad()
    peak_bytes(forward)
    found = [peak_bytes(forward_and_backward), peak_bytes(optimizer.step)]
    optimizer.zero_grad()
    return [*found, peak_bytes(forward)]


def bytes_of_a_use(model, dtype):
    """What a linear has beyond a plain one while it multiplies: codes of weight and activations, and on
    CPU the values they stand for."""
    weight = max((p for p in model.parameters() if p.dim() == 2), key=torch.numel)
    activations = torch.empty(batch(0).shape[0], weight.shape[0])
    return sum(
        TensorState(ops.quantize(x.detach(), "mxfp8")).storage_bytes()["storage"] + x.numel() * dtype.itemsize
        for x in (weight, activations)
    )


@pytest.mark.pairwise
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("mixed_precision", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("format", FORMATS)
def test_peak_of_a_step(format, mixed_precision, strategy, use_orig_params, world):
    kwargs = dict(
        strategy=strategy, use_orig_params=use_orig_params, mixed_precision=mixed_precision
    )
    with silent_world(world):
        torch.manual_seed(0)
        model = Model(ROWS, format=format)
        use = bytes_of_a_use(model, torch.bfloat16 if mixed_precision else torch.float32)
        *plain, forward = peaks(wrap(model, **kwargs))
        *peak, peak_of_forward = peaks(build_fsdp1(format, rows=ROWS, **kwargs))
    for ours, others in zip(peak, plain, strict=True):
        assert ours <= others + STATE
    assert peak_of_forward <= forward + use + STATE
