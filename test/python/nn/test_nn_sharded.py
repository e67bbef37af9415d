"""qshard.nn under stock FSDP2: the bits of one process, initial values that do not depend on the mesh,
DCP."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist_helpers import device, full_mesh, on_ranks, on_worlds, shared_folder
from helpers import fit
from models.training import adamw
from models.weights import check_gathered, different, full_value, local, quantized_parameters
from nn_helpers import RECIPES
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import qshard
from qshard import nn

BUDGET_S = 60
HIDDEN, FFN = 96, 104  # neither is whole blocks of 128
MODELS = {
    "default": {},
    "llama": {"fuse_qkv_params": True, "num_gqa_groups": 2, "bias": False, "activation": "swiglu",
              "normalization": "RMSNorm", "qk_norm_type": "RMSNorm"},
    "decoder": {"layer_type": "decoder", "fuse_qkv_params": True},
}


class Model(torch.nn.Module):
    def __init__(self, kind, format, recompute=False, layers=2):
        super().__init__()
        ffn = fit(format, FFN)
        self.layers = torch.nn.ModuleList(
            nn.TransformerLayer(HIDDEN, ffn, 4, hidden_dropout=0.0, attention_dropout=0.0,
                                attn_input_format="bshd", layer_number=i + 1, **MODELS[kind])
            for i in range(layers)
        )
        self.head = nn.LayerNormLinear(HIDDEN, fit(format, 8), normalization="RMSNorm")
        self.is_decoder, self.recompute = kind == "decoder", recompute

    def forward(self, x):
        more = {"encoder_output": x.detach()} if self.is_decoder else {}
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(layer, x, use_reentrant=False, **more)
            else:
                x = layer(x, **more)
        return self.head(x)


def build(kind, format, recompute=False, seed=0, keep_master=True):
    torch.manual_seed(seed)
    model = Model(kind, format, recompute).to(device())
    all_of_them = lambda *_: True  # noqa: E731
    return qshard.quantize_(model, RECIPES[format], keep_master=keep_master, filter_fn=all_of_them)


def shard(model, mesh=None, **kwargs):
    mesh = mesh or full_mesh()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def batch(step, microbatch, rank):
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank + 1)
    return torch.randn(2, 5, HIDDEN, generator=generator).to(device())


def train(model, steps=2, microbatches=2):
    optimizer = adamw(model)
    for step in range(steps):
        for microbatch in range(microbatches):
            model(batch(step, microbatch, dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_alone(model, ranks, steps=2, microbatches=2):
    """What that many ranks do: gradients of their batches are averaged, and those averages added up."""
    optimizer = adamw(model)
    parameters = list(model.parameters())
    for step in range(steps):
        for microbatch in range(microbatches):
            by_rank = [
                torch.autograd.grad(
                    model(batch(step, microbatch, rank)).square().mean(), parameters
                )
                for rank in range(ranks)
            ]
            for parameter, *grads in zip(parameters, *by_rank):
                mean = sum(grads) / ranks
                parameter.grad = mean if parameter.grad is None else parameter.grad + mean
        optimizer.step()
        optimizer.zero_grad()


def full_values(model):
    return {name: full_value(parameter) for name, parameter in model.named_parameters()}


def run_equals_alone(kind, format, recompute, keep_master, mesh_shape):
    alone = build(kind, format, keep_master=keep_master)
    model = build(kind, format, recompute, keep_master=keep_master)
    shard(model, full_mesh(*mesh_shape, names=("replicate", "shard")) if mesh_shape else None)
    train_alone(alone, dist.get_world_size())
    train(model)
    check_gathered(model)
    got, want = full_values(model), full_values(alone)
    if device().type == "cpu" and not mesh_shape:  # four gradients have an order in which they add up
        assert not different(got, want)
    # Where a gradient is close to zero, AdamW makes a whole step of its sign.
    for name in want:
        assert (got[name] - want[name]).abs().mean() < 1e-3, name


@pytest.mark.each_value
@pytest.mark.parametrize("format", RECIPES)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@on_ranks(2)
def test_two_ranks_are_one_process(kind, format, recompute, keep_master):
    run_equals_alone(kind, format, recompute, keep_master, None)


@on_ranks(4)
def test_hsdp_trains_as_one_process():
    run_equals_alone("llama", "float8_blockwise", False, True, (2, 2))


# ------------------------------------------------------------------------------ meta init


def run_meta_init(kind, format):
    torch.manual_seed(0)
    with qshard.quantized_model_init(recipe=RECIPES[format]):
        whole = Model(kind, format).to(device())
        with torch.device("meta"):
            model = Model(kind, format)
    assert len(quantized_parameters(model)) == len(quantized_parameters(whole)) > 0
    shard(model).to_empty(device=device())
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    got = full_values(model)
    if device().type == "cpu":  # to(device) does not change what the CPU's generator drew
        assert not different(got, full_values(whole))
    check_gathered(model)
    train(model, steps=1)
    check_gathered(model)
    return {name: value.cpu() for name, value in got.items()}


@pytest.mark.parametrize("kind,format", [("default", "float8_blockwise"), ("llama", "nvfp4"),
                                         ("decoder", "float8_delayed")])
@on_worlds(2, 3)
def test_initial_values_do_not_depend_on_the_mesh(world, kind, format):
    by_rank = world.run(run_meta_init, kind, format)
    assert all(not different(by_rank[0], values) for values in by_rank)


# ----------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("kind,format", [("default", "float8_delayed"), ("llama", "float8_blockwise")])
@on_ranks(2)
def test_dcp_round_trip(kind, format):
    model = shard(build(kind, format))
    train(model, steps=1)
    fresh = shard(build(kind, format, seed=1))
    with shared_folder() as folder:
        dcp.save(get_model_state_dict(model), checkpoint_id=folder / "model")
        state = get_model_state_dict(fresh)
        dcp.load(state, checkpoint_id=folder / "model")
        set_model_state_dict(fresh, state)
    assert not different(full_values(fresh), full_values(model))
    check_gathered(fresh)
    x = batch(7, 0, 0)
    assert torch.equal(fresh(x), model(x))


# ------------------------------------------------------------------- bf16 and compiled layers


def run_mixed_precision(compiled):
    torch._dynamo.reset()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = build("llama", "float8_tensorwise")
    if compiled:
        for layer in model.layers:
            layer.compile(fullgraph=True, backend="aot_eager")
    shard(model, mp_policy=policy)
    y = model(batch(0, 0, dist.get_rank()))
    assert y.dtype == torch.bfloat16
    y.float().square().mean().backward()
    grads = {name: local(p.grad).clone() for name, p in model.named_parameters()}
    assert all(grad.dtype == torch.float32 for grad in grads.values())
    adamw(model).step()
    check_gathered(model)
    return {name: grad.cpu() for name, grad in grads.items()}


@on_worlds(2)
def test_mixed_precision_eager_and_compiled(world):
    eager, compiled = (world.run(run_mixed_precision, flag) for flag in (False, True))
    for one, other in zip(eager, compiled):
        for name in one:
            torch.testing.assert_close(other[name], one[name], rtol=3e-2, atol=3e-3)


@pytest.mark.parametrize("compiled", [False, True])
@on_ranks(2)
def test_rotary_angles_are_not_cast(compiled):
    """A layer in bf16 that computes its angles out of FSDP2's sight, and what FSDP2 gives it of angles."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = nn.TransformerLayer(HIDDEN, FFN, 4, hidden_dropout=0.0, attention_dropout=0.0,
                                attn_input_format="bshd", device=device(), **MODELS["llama"])
    qshard.quantize_(layer, RECIPES["float8_tensorwise"])
    angles = nn.RotaryPositionEmbedding(HIDDEN // 4, device=device())(4096)[-5:]
    x = batch(0, 0, dist.get_rank()).bfloat16()
    alone = copy.deepcopy(layer).to(torch.bfloat16)(x, rotary_pos_emb=angles)
    if compiled:
        layer.compile(fullgraph=True, backend="aot_eager")
    fully_shard(layer, mesh=full_mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for given in (angles, (angles, angles)):
        torch.testing.assert_close(layer(x, rotary_pos_emb=given), alone, rtol=1e-2, atol=1e-2)
    plain = angles.as_subclass(torch.Tensor)
    with pytest.raises(Exception, match="rotary_pos_emb in torch.bfloat16.*cast_forward_inputs=False"):
        layer(x, rotary_pos_emb=plain)


# ------------------------------------------------------------------------ context parallelism


@on_ranks(2, devices=("cpu",))
def test_context_parallel_groups():
    rank, whole = dist.get_rank(), dist.group.WORLD
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    attention = nn.DotProductAttention(4, 8, cp_group=alone, cp_global_ranks=[rank], cp_stream=object(),
                                       cp_comm_type="a2a")
    layer = nn.TransformerLayer(HIDDEN, FFN, 4)
    layer.set_context_parallel_group([alone, alone], [rank], None)
    for make in (lambda: nn.DotProductAttention(4, 8, cp_group=whole),
                 lambda: attention.set_context_parallel_group(whole, [0, 1], None),
                 lambda: layer.set_context_parallel_group([alone, whole], [0, 1], None)):
        with pytest.raises(NotImplementedError, match="cp_group of 2 ranks"):
            make()
