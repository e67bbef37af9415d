"""qshard.report's bytes per step beside those that the collectives of one carry."""

import pytest
import torch
import torch.distributed as dist
from collective_calls import bytes_sent, sent_by
from dist_helpers import device, full_mesh, on_ranks
from models.blocks import Model
from models.formats import quantize_model
from models.fsdp1 import BF16, build_fsdp1
from models.fsdp2 import build, shard
from models.training import adamw, batch, loss_of, train
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import qshard

BUDGET_S = 60
WEIGHTS = ("all_gather_into_tensor", "all_gather")
BF16_WEIGHTS = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
FP32_GRADIENTS = {
    "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
}


def observed(model, loss=None, weights=WEIGHTS):
    """What a forward and backward send, as the report said beforehand; by collective."""
    before, text = qshard.report(model).sent(), str(qshard.report(model))
    with bytes_sent() as calls:
        (loss() if loss else loss_of(model, batch(0))).backward()
    gradients = {name for name, _ in calls if name not in (*weights, "agreement")}
    assert before.weights == sent_by(calls, *weights), (before, calls)
    assert before.gradients == sent_by(calls, *gradients), (before, calls)
    assert f"weights {before.weights:,} B, gradients {before.gradients:,} B" in text
    model.zero_grad()
    return {name: sent_by(calls, name) for name, _ in calls}


@pytest.mark.parametrize("reduced", (None, "float8", "nvfp4"))
@pytest.mark.parametrize("reshard", (None, True, False), ids=("auto", "reshard", "keep"))
@pytest.mark.parametrize("policy", ({}, BF16_WEIGHTS, FP32_GRADIENTS), ids=("fp32", "bf16", "mixed"))
@pytest.mark.parametrize("weights", (None, "mix-1", "mix-2"))
@pytest.mark.pairwise
@on_ranks(2, 3)
def test_the_report_predicts_what_fsdp2_sends(weights, policy, reshard, reduced):
    kwargs = dict(policy, reshard_after_forward=reshard)
    torch.manual_seed(0)
    model = build(weights, **kwargs) if weights else shard(Model().to(device()), **kwargs)
    if reduced:
        qshard.reduce_gradients_(model, reduced, filter_fn=lambda _, name: name != "blocks.0")
    first = observed(model)
    # Known before the first forward, while a root's weights stay gathered, and after all are sharded.
    assert observed(model) == first
    optimizer = adamw(model)
    train(model, optimizer, steps=1)
    for module in (m for m in model.modules() if isinstance(m, FSDPModule)):
        module.reshard()
    assert observed(model) == first
    assert ("all_to_all_single" in first) == (reduced is not None)


@on_ranks(2)
def test_dtypes_of_the_caller_stand_for_those_of_the_policy():
    """The caller's dtypes stand for those of the policy."""
    model = shard(Model().to(device()))
    fp32, bf16 = (
        qshard.report(model, param_dtype=dtype, reduce_dtype=dtype).sent()
        for dtype in (None, torch.bfloat16)
    )
    assert (fp32.weights, fp32.gradients) == (2 * bf16.weights, 2 * bf16.gradients)
    reduced = qshard.report(model, reduce_dtype=torch.bfloat16).sent()
    assert (reduced.weights, reduced.gradients) == (fp32.weights, bf16.gradients)


@on_ranks(2, 4)
def test_other_groups_of_fsdp2():
    """Groups that are not cut by rows, that have nothing to train, that backward does not gather, and a
    reshard to some of the ranks."""
    torch.manual_seed(0)
    mesh = full_mesh()

    def columns(param):
        return Shard(1) if param.ndim == 2 and param.shape[1] % 4 == 0 else None

    model = shard(Model(256).to(device()), shard_placement_fn=columns)
    qshard.reduce_gradients_(model, "float8")
    model.blocks[0].requires_grad_(False)
    observed(model)
    model = torch.nn.Sequential(torch.nn.Embedding(48, 100), torch.nn.Linear(100, 100)).to(device())
    fully_shard(model[0], mesh=mesh).set_unshard_in_backward(False)
    fully_shard(model, mesh=mesh)
    observed(model, lambda: model(torch.arange(9, device=device())).square().mean())
    observed(build("mxfp8_1x32[phase]", reshard_after_forward=True))
    model = torch.nn.Sequential(*(torch.nn.Linear(100, 100, bias=False) for _ in range(2)))
    for layer in model.to(device()):  # each a root
        fully_shard(layer, mesh=mesh)
    observed(model)
    if mesh.size() == 4:
        model = torch.nn.Sequential(*(torch.nn.Linear(100, 100, bias=False) for _ in range(2)))
        fully_shard(model.to(device())[0], mesh=mesh, reshard_after_forward=2)
        observed(fully_shard(model, mesh=mesh))


@pytest.mark.parametrize("weights, reduced", [(None, None), (None, "float8"), ("nvfp4", "nvfp4")])
@on_ranks(4)
def test_the_report_predicts_what_hsdp_sends(weights, reduced):
    mesh = full_mesh(2, 2, names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    torch.manual_seed(0)
    model = Model().to(device())
    if weights:
        quantize_model(model, weights)
    shard(model, mesh, mp_policy=policy)
    if reduced:
        qshard.reduce_gradients_(model, reduced)
    sent = observed(model)
    # Gradients of a rank's rows in bf16, there and back to one other replica; few bits over the shards.
    numel = sum(-(-p.shape[0] // 2) * p.shape[1:].numel() for p in model.parameters())
    assert sent["all_reduce"] == 2 * numel
    if reduced:
        assert sent["all_to_all_single"] < {"float8": 1.02, "nvfp4": 0.58}[reduced] * numel
    else:
        assert sent["reduce_scatter_tensor"] == 2 * numel


@on_ranks(2)
def test_replicas_alone_reduce_nothing_in_few_bits():
    """Shards of one rank: nothing is reduced in few bits, and the report says so."""
    mesh = full_mesh(dist.get_world_size(), 1, names=("replicate", "shard"))
    models = [shard(Model().to(device()), mesh), replicate(Model().to(device()), mesh=full_mesh())]
    qshard.reduce_gradients_(models[0], "float8")
    for model in models:
        sent = observed(model)
        numel = sum(p.numel() for p in model.parameters())
        assert sum(sent.values()) == sent["all_reduce"] and sent["all_reduce"] <= 8 * numel


@on_ranks(4)
def test_beside_tensor_parallel():
    """Bytes sent for what tensor parallelism cut, whole norms among it."""
    mesh = full_mesh(2, 2, names=("data", "tensor"))
    torch.manual_seed(0)
    model = Model(256).to(device())
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], plan)
    quantize_model(model, "float8_blockwise", tp_mesh=mesh["tensor"])
    shard(model, mesh["data"])
    qshard.reduce_gradients_(model, "float8")
    generator = torch.Generator().manual_seed(mesh["data"].get_local_rank())
    x = torch.randn(16, 100, generator=generator).to(device())
    # Activations go by functional collectives, which are not among those observed.
    observed(model, lambda: loss_of(model, x))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("hook", (None, "float8", "nvfp4"))
@on_ranks(2, 3)
def test_the_report_predicts_what_ddp_sends(hook, dtype):
    torch.manual_seed(0)
    model = DistributedDataParallel(Model().to(device(), dtype), bucket_cap_mb=0.1)
    # The stock hook does what DDP does without one, and is seen from Python.
    model.register_comm_hook(None, allreduce_hook if hook is None else qshard.ddp_comm_hook(hook))
    for step in range(3):  # DDP makes other buckets after the first, and tells in the third
        loss_of(model, batch(step, dtype=dtype)).backward()
    sent = observed(model, lambda: loss_of(model, batch(3, dtype=dtype)), weights=())
    numel, ranks = sum(p.numel() for p in model.parameters()), dist.get_world_size()
    plain = 2 * numel * dtype.itemsize * (ranks - 1) // ranks
    if hook is None:
        assert abs(sent["all_reduce"] - plain) <= 8
    else:
        share = {"float8": 1.02, "nvfp4": 0.6}[hook] / dtype.itemsize
        assert sum(sent.values()) < share * plain


@pytest.mark.parametrize("strategy", ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"))
@on_ranks(4)
def test_the_report_predicts_what_fsdp1_sends(strategy):
    model = build_fsdp1("float8_blockwise", strategy=strategy, mixed_precision=BF16)
    loss_of(model, batch(0)).backward()
    model.zero_grad()
    sent = observed(model)
    assert strategy == "NO_SHARD" or sum(map(sent.get, filter(sent.get, WEIGHTS))) > 0
    assert ("all_reduce" in sent) == (strategy in ("NO_SHARD", "HYBRID_SHARD"))


@on_ranks(2)
def test_ddp_of_two_dtypes():
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 96), torch.nn.Linear(96, 64).bfloat16()
    model = torch.nn.Sequential(*layers).to(device())
    model = DistributedDataParallel(model, bucket_cap_mb=0.01)
    model.register_comm_hook(None, qshard.ddp_comm_hook("float8"))
    x = torch.randn(8, 64, device=device())

    model.module[0].register_forward_hook(lambda _, __, output: output.bfloat16())
    for _ in range(3):
        model(x).sum().backward()
    observed(model, lambda: model(x).sum(), weights=())
