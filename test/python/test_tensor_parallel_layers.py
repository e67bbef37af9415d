"""MultiheadAttention and TransformerLayer over tensor-parallel ranks: outputs and gradients of one process."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist_helpers import device, full_mesh, on_worlds, shared_folder
from nn_helpers import RECIPES, randomize, relative_error
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import qshard
from qshard import nn

HIDDEN, FFN, HEADS, LENGTH, BATCH = 64, 128, 4, 8, 2
LAYERS = {
    "default": {},
    "grouped": {"fuse_qkv_params": True, "num_gqa_groups": 2, "bias": False, "activation": "srelu",
                "normalization": "RMSNorm", "qk_norm_type": "RMSNorm"},
    "decoder": {"layer_type": "decoder", "fuse_qkv_params": True, "output_layernorm": True},
    "post": {"apply_residual_connection_post_layernorm": True, "softmax_type": "learnable"},
    "beside": {"parallel_attention_mlp": True, "qk_norm_type": "LayerNorm"},
}


def build(kind, format=None, seed=0, **parallel):
    torch.manual_seed(seed)
    module = nn.TransformerLayer(HIDDEN, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, device=device(),
                                 set_parallel_mode=True, **LAYERS[kind], **parallel)
    return module, format


def quantized(module, format, **kwargs):
    if format is not None:
        qshard.quantize_(module, RECIPES[format], filter_fn=lambda *_: True, **kwargs)


@torch.no_grad()
def write(module, plain):
    """The values of a layer of one process."""
    for name, parameter in module.named_parameters():
        value = plain.get_parameter(name)
        if isinstance(parameter, DTensor):
            value = torch.distributed.tensor.distribute_tensor(
                value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(value)


def tokens(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LENGTH, BATCH, HIDDEN, generator=generator).to(device())


def options(kind):
    more = {"rotary_pos_emb": nn.RotaryPositionEmbedding(HIDDEN // HEADS, device=device())(LENGTH)}
    if kind == "post":
        more = {"core_attention_bias_type": "alibi"}
    elif kind == "beside":
        bias = torch.randn(1, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5))
        more["core_attention_bias_type"] = "post_scale_bias"
        more["core_attention_bias"] = bias.to(device())
    return more


def step(module, kind, part=lambda x: x):
    """Output, and gradients of the input and of all parameters, of the tokens that are this rank's."""
    module.zero_grad()
    x = part(tokens(1)).clone().requires_grad_()
    cross = {"encoder_output": part(tokens(2))} if kind == "decoder" else {}
    y = module(x, **options(kind), **cross)
    (y * part(tokens(3))).sum().backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    return y.detach(), x.grad, {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


def run_equals_one_process(kind, format, sequence_parallel, how):
    mesh = full_mesh(1, dist.get_world_size(), names=("dp", "tp"))
    tp = mesh["tp"]
    plain = randomize(build(kind)[0])
    more = {"sequence_parallel": sequence_parallel}
    if how == "group":
        module, _ = build(kind, tp_group=tp.get_group(), tp_size=tp.size(), **more)
    else:
        module, _ = build(kind, **more)
        module.set_device_mesh(tp)
    assert all(isinstance(p, DTensor) for p in module.parameters())
    write(module, plain)
    for one in (module, plain):
        quantized(one, format, weight_only=sequence_parallel)  # else it sends codes of activations
    if how == "fsdp":
        fully_shard(module, mesh=mesh["dp"])

    def part(x):
        return x.chunk(tp.size())[tp.get_local_rank()] if sequence_parallel else x

    y, x_grad, grads = step(module, kind, part)
    expected, expected_x_grad, expected_grads = step(plain, kind)
    bound = 1e-5 if format is None or device().type == "cpu" else 6e-2
    assert relative_error(y, part(expected)) < bound
    assert relative_error(x_grad, part(expected_x_grad)) < bound
    assert grads.keys() == expected_grads.keys()
    largest = max(g.norm().item() for g in expected_grads.values())
    for name, grad in grads.items():
        difference = (grad - expected_grads[name]).norm().item()
        assert difference < bound * max(expected_grads[name].norm().item(), 1e-2 * largest), name


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("format", [None, "float8_tensorwise", "float8_blockwise", "mxfp8"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("how", ["group", "mesh", "fsdp"])
@on_worlds(2)
def test_equals_one_process(world, kind, format, sequence_parallel, how):
    world.run(run_equals_one_process, kind, format, sequence_parallel, how)
