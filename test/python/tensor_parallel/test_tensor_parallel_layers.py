"""MultiheadAttention and TransformerLayer over tensor-parallel ranks: outputs and gradients of one process."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist_helpers import device, full_mesh, on_ranks, shared_folder
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
    "llama": {"fuse_qkv_params": True, "num_gqa_groups": 2, "bias": False, "activation": "swiglu",
              "normalization": "RMSNorm"},
    "gated": {"activation": "geglu"},
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


def value_of(plain, name, of=lambda parameter: parameter):
    """The value of a parameter of the layer over a mesh."""
    for i, half in enumerate(("fc1_gate_", "fc1_up_")):
        if half in name:
            return of(plain.get_parameter(name.replace(half, "fc1_"))).chunk(2)[i]
    return of(plain.get_parameter(name))


@torch.no_grad()
def write(module, plain):
    """The values of a layer of one process."""
    for name, parameter in module.named_parameters():
        value = value_of(plain, name)
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


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("format", [None, "float8_tensorwise", "float8_blockwise", "mxfp8"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("how", ["group", "mesh", "fsdp"])
@on_ranks(2)
def test_equals_one_process(kind, format, sequence_parallel, how):
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
    expected, expected_x_grad, _ = step(plain, kind)
    expected_grads = {name: value_of(plain, name, lambda p: p.grad) for name in grads}
    bound = 1e-5 if format is None or device().type == "cpu" else 6e-2
    assert relative_error(y, part(expected)) < bound
    assert relative_error(x_grad, part(expected_x_grad)) < bound
    largest = max(g.norm().item() for g in expected_grads.values())
    for name, grad in grads.items():
        difference = (grad - expected_grads[name]).norm().item()
        assert difference < bound * max(expected_grads[name].norm().item(), 1e-2 * largest), name


# ------------------------------------------------------------------- initial values, checkpoints


@pytest.mark.parametrize("kind", ["llama", "gated", "post"])
@on_ranks(2)
def test_initial_values_are_those_of_one_process(kind):
    """Those of one process, drawn by the constructor, and after the meta device."""
    mesh = full_mesh(1, dist.get_world_size(), names=("dp", "tp"))
    plain, _ = build(kind, seed=3)
    drawn, _ = build(kind, seed=3, tp_group=mesh["tp"].get_group())
    with torch.device("meta"):
        later = nn.TransformerLayer(HIDDEN, FFN, HEADS, set_parallel_mode=True, **LAYERS[kind])
    later.set_device_mesh(mesh["tp"])
    fully_shard(later, mesh=mesh["dp"]).to_empty(device=device())
    torch.manual_seed(3)
    for module in later.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for module in (drawn, later):
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter.full_tensor(), value_of(plain, name)), name


@pytest.mark.parametrize("format", [None, "float8_blockwise"])
@on_ranks(2)
def test_checkpoints_of_tensor_parallelism_load_over_fsdp(format):
    """Saved over two ranks of tensor parallelism, loaded over FSDP's."""
    meshes = [full_mesh(*shape, names=("dp", "tp")) for shape in ((1, 2), (2, 1))]

    def make(mesh, seed):
        module, _ = build("llama", seed=seed)
        module.set_device_mesh(mesh["tp"])
        quantized(module, format)
        return fully_shard(module, mesh=mesh["dp"])

    saved, fresh = make(meshes[0], 0), make(meshes[1], 1)
    with shared_folder() as folder:
        dcp.save(get_model_state_dict(saved), checkpoint_id=folder / "model")
        state = get_model_state_dict(fresh)
        dcp.load(state, checkpoint_id=folder / "model")
        set_model_state_dict(fresh, state)
    for name, parameter in saved.named_parameters():
        assert torch.equal(parameter.full_tensor(), fresh.get_parameter(name).full_tensor()), name
    # One process has one fc1, and takes the halves for it; and the other way round.
    alone, _ = build("llama", seed=2)
    whole = {name: p.full_tensor() for name, p in saved.state_dict().items()}
    alone.load_state_dict(whole)
    mlp = nn.LayerNormMLP(HIDDEN, FFN, activation="swiglu", bias=False, normalization="RMSNorm",
                          set_parallel_mode=True, tp_mesh=meshes[0]["tp"])
    given = {name: torch.distributed.tensor.distribute_tensor(p.detach(), meshes[0]["tp"])
             for name, p in alone.layernorm_mlp.named_parameters()}
    mlp.load_state_dict(given)
    for name, parameter in mlp.named_parameters():
        assert torch.equal(parameter.full_tensor(), whole[f"layernorm_mlp.{name}"]), name


# ----------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("by", ["group", "mesh"])
@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"num_gqa_groups": 1}, ValueError, "num_gqa_groups=1 cannot be cut over 2"),
        ({"fuse_qkv_params": True, "qkv_weight_interleaved": False}, NotImplementedError, "interleave it"),
        ({"fuse_qkv_params": True, "fuse_wgrad_accumulation": True}, NotImplementedError, "fuse_wgrad_acc"),
        ({"sequence_parallel": True, "set_parallel_mode": False}, NotImplementedError, "tokens would attend"),
    ],
    ids=["groups", "not interleaved", "accumulation", "sequence alone"],
)
@on_ranks(2, devices=("cpu",))
def test_wrong_arguments_of_layers_are_refused(arguments, error, message, by):
    tp = full_mesh(dist.get_world_size())
    arguments = {"set_parallel_mode": True, **arguments}
    with pytest.raises(error, match=message):
        if by == "group":
            nn.TransformerLayer(HIDDEN, FFN, HEADS, tp_group=tp.get_group(), **arguments)
        else:
            nn.TransformerLayer(HIDDEN, FFN, HEADS, **arguments).set_device_mesh(tp)


@on_ranks(2, devices=("cpu",))
def test_a_wrong_tp_size_is_refused():
    group = full_mesh(dist.get_world_size()).get_group()
    with pytest.raises(ValueError, match="tp_size=4, and the mesh or group has 2"):
        nn.MultiheadAttention(HIDDEN, HEADS, tp_group=group, tp_size=4)

