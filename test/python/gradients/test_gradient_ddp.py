"""Gradients in few bits under DistributedDataParallel."""

import pytest
import torch
import torch.distributed as dist
from dist_helpers import device, on_ranks
from models.blocks import Model
from models.training import REDUCTION_ERROR, batch, gradients, loss_of, relative_error
from torch.nn.parallel import DistributedDataParallel

import qshard


@pytest.mark.parametrize("rounding", ("nearest", "stochastic"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("fmt", REDUCTION_ERROR)
@pytest.mark.pairwise
@on_ranks(2, 3)
def test_gradients_of_ddp_are_near_plain_ones(fmt, dtype, rounding):
    models, world = [], dist.get_world_size()
    for _ in range(2):
        torch.manual_seed(0)
        models.append(DistributedDataParallel(Model().to(device(), dtype), bucket_cap_mb=0.1))
    hook = qshard.ddp_comm_hook(fmt, rounding=rounding)
    models[1].register_comm_hook(None, hook)
    for step in range(2):  # DDP puts parameters into other buckets after the first
        for model in models:
            model.zero_grad()
            loss_of(model, batch(step, dtype=dtype)).backward()
        plain, got = (gradients(model) for model in models)
        factor = 2 if rounding == "nearest" else 3
        assert 0 < relative_error(got, plain) < factor * REDUCTION_ERROR[fmt]
        for name, gradient in got.items():
            first = gradient.clone()
            dist.broadcast(first, src=0)
            assert torch.equal(first, gradient), name
    if rounding == "stochastic":
        count = hook.state_dict()["gradient_rounding"]
        assert count[2] >= 4
        other = qshard.ddp_comm_hook(fmt, rounding=rounding)
        other.load_state_dict(hook.state_dict())
        assert torch.equal(other.state_dict()["gradient_rounding"].cpu(), count.cpu())
    assert world > 1


@pytest.mark.parametrize("dtype, share", [(torch.float32, 0.4), (torch.bfloat16, 1.8)], ids=str)
@on_ranks(2, devices=("cuda",))
def test_memory_beside_a_bucket(dtype, share):
    """What a reduction takes beside its bucket, in shares of the bucket."""
    peaks = {}
    for format in (None, "float8", "nvfp4"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(8)))
        ddp = DistributedDataParallel(model.to(device(), dtype), gradient_as_bucket_view=True)
        if format is not None:
            ddp.register_comm_hook(None, qshard.ddp_comm_hook(format))
        x = torch.randn(16, 2048, device=device(), dtype=dtype)
        for _ in range(4):  # DDP tells of its buckets in the third step
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            ddp(x).float().square().mean().backward()
            torch.cuda.synchronize()
        peaks[format] = torch.cuda.max_memory_allocated() - before
        sizes = ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        bucket = max(map(int, sizes.split(",")))
        del ddp, model
    plain = peaks.pop(None)
    assert all(peak <= plain + share * bucket for peak in peaks.values()), (plain, bucket, peaks)
