"""digests and verify, and tensors as engines hold them in memory."""

import json
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from decoding import assert_same_bits, decoded
from dist_helpers import device, full_mesh, on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import qshard
from qshard.checkpoint import digests, ignored_modules, quantized_tensors, verify

ops = torch.ops.qshard
ROWS = {
    "fp8": (qshard.Float8BlockScaling(), {"layout": "deepseek-fp8"}),
    "ue8m0": (qshard.Float8BlockScaling(), {"layout": "deepseek-fp8", "scale_fmt": "ue8m0"}),
    "vllm": (qshard.Float8BlockScaling(), {"layout": "vllm"}),
    "sglang": (qshard.Float8BlockScaling(), {"layout": "sglang"}),
    "sglang, ue8m0": (qshard.Float8BlockScaling(), {"layout": "sglang", "scale_fmt": "ue8m0"}),
    "tensor": (qshard.Float8CurrentScaling(), {"layout": "compressed-tensors"}),
    "channel": (qshard.Float8RowwiseScaling(), {"layout": "compressed-tensors"}),
    "mxfp8": (qshard.MXFP8BlockScaling(), {"layout": "modelopt"}),
    "nvfp4": (qshard.NVFP4BlockScaling(), {"layout": "compressed-tensors"}),
    "nvfp4, multiplies": (qshard.NVFP4BlockScaling(), {"layout": "modelopt"}),
}
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Block(nn.Module):
    def __init__(self, dim=160):
        super().__init__()
        self.q_proj = nn.Linear(dim, 256)
        self.k_proj = nn.Linear(dim, 128)
        self.v_proj = nn.Linear(dim, 128)
        self.gate_proj = nn.Linear(dim, 384, bias=False)
        self.up_proj = nn.Linear(dim, 384, bias=False)
        self.down_proj = nn.Linear(640, 72, bias=False)
        self.gate = nn.Linear(dim, 3, bias=False)
        self.conv = nn.Conv2d(2, 3, 5)
        self.register_buffer("count", torch.tensor(5))


def build(recipe, **kwargs):
    torch.manual_seed(0)
    model = Block()
    with torch.no_grad():
        model.q_proj.weight[130:140] = 0
        model.down_proj.weight[7, 600] = float("nan")
        for name in PARTS["qkv_proj"]:
            getattr(model, name).weight[0, 0] = 1
        model.gate_proj.weight[0, 0] = model.up_proj.weight[0, 0] = 1
    return qshard.quantize_(model.to(device()), recipe, filter_fn=lambda m, name: name.endswith("proj"), **kwargs)


@on_ranks(1, 2, 4)
def test_digests_are_equal_on_every_mesh_and_those_of_what_is_sent():
    rows = ROWS if dist.get_world_size() == 2 else ("fp8", "sglang, ue8m0", "nvfp4")
    for recipe, options in map(ROWS.get, rows):
        row = str(options)
        want = digests(build(recipe), **options)
        model = build(recipe)
        for name in ("q_proj", "down_proj", "conv"):
            fully_shard(model.get_submodule(name))
        fully_shard(model)
        assert digests(model, **options) == want, row
        sent = dict(quantized_tensors(model, **options))
        verify(sent.items(), json.loads(json.dumps(want)))
        assert want.keys() == sent.keys()
    if dist.get_world_size() == 4:
        model = build(recipe)
        mesh = full_mesh(2, 2, names=("replicas", "shards"))
        fully_shard(model, mesh=mesh)
        assert digests(model, **options) == want


@on_ranks(2, devices=("cpu",))
def test_digests_under_tensor_parallelism():
    """The cut of gate is on a block boundary; that of odd is not, and the digest is of what is sent."""

    def build_linears(mesh=None):
        torch.manual_seed(0)
        model = nn.ModuleDict(
            {"gate": nn.Linear(128, 256), "down": nn.Linear(256, 64), "odd": nn.Linear(64, 200, bias=False)}
        )
        if mesh is not None:
            parallelize_module(model, mesh, {"gate": ColwiseParallel(), "down": RowwiseParallel(), "odd": ColwiseParallel()})
        return qshard.quantize_(model, "float8_blockwise", **({} if mesh is None else {"tp_mesh": mesh}))

    want = digests(build_linears(), layout="deepseek-fp8")
    model = build_linears(full_mesh(names=("tp",)))
    assert digests(model, layout="deepseek-fp8") == want  # with masters, as one process would
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "qshard.checkpoint.quantized_tensors: odd.weight: tensor parallelism has cut")
        verify(quantized_tensors(model, layout="deepseek-fp8"), want)


def mix64(x):
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ x >> shift & (1 << 64 - shift) - 1) * factor
    return x ^ x >> 31 & (1 << 33) - 1


def digest(words, plane):
    rows, columns = (torch.arange(size) for size in words.shape)
    return int(mix64(words + mix64(plane << 60 | rows[:, None] << 30 | columns)).sum()) % 2**64


def test_ten_lines_of_a_receiver():
    """And SplitMix64, by the numbers that its author gives: the first outputs of seed 1234567."""
    seed, step = 1234567, 0x9E3779B97F4A7C15
    outputs = [int(mix64(torch.tensor(((seed + step * (i + 1)) + 2**63) % 2**64 - 2**63))) % 2**64 for i in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    model = build(qshard.Float8BlockScaling())
    known = digests(model, layout="vllm", plain_dtype=None)
    for name, tensor in quantized_tensors(model, layout="vllm", plain_dtype=None):
        kind, value = known[name]
        if kind == "codes":
            assert digest(tensor.view(torch.uint8).long(), 0) == value
        elif kind == "scales":
            assert digest(torch.where(tensor.isnan(), 0x7FC00000, tensor.view(torch.int32).long()), 1) == value
        elif tensor.dtype == torch.float32:
            assert digest(tensor.view(torch.int32).reshape(tensor.shape[0], -1).long(), 0) == value
    assert known["count"] == ("plain", digest(torch.tensor([[5]]), 0))


def test_what_is_not_there_or_not_the_same_is_named():
    model = build(qshard.NVFP4BlockScaling())
    known = digests(model, layout="modelopt")
    tensors = dict(quantized_tensors(model, layout="modelopt"))
    for name in ("down_proj.weight", "q_proj.weight_scale", "up_proj.weight_scale_2", "conv.bias"):
        tensor = tensors[name]
        flat = tensor.clone().reshape(-1).view(torch.uint8)
        flat[-1] ^= 1
        wrong = {**tensors, name: flat.view(tensor.dtype).reshape(tensor.shape)}
        with pytest.raises(ValueError, match=rf"checkpoint.verify: {name} has other bytes"):
            verify(wrong.items(), known)
    missing = {k: v for k, v in tensors.items() if k != "count"}
    with pytest.raises(ValueError, match="more is unexpected, count is missing; send these tensors again"):
        verify({**missing, "more": torch.ones(1)}.items(), known)
    swapped = {**tensors, "gate_proj.weight": tensors["up_proj.weight"], "up_proj.weight": tensors["gate_proj.weight"]}
    with pytest.raises(ValueError, match="gate_proj.weight has other bytes, up_proj.weight has other bytes"):
        verify(swapped.items(), known)
    with pytest.raises(TypeError, match="unknown argument 'bucket'"):
        digests(model, layout="modelopt", bucket=3)


# ------------------------------------------------------------------------------ engines


def whole(model, name):
    return ops.dequantize(model.get_parameter(name).detach(), dtype=torch.float32)


@pytest.mark.parametrize("row", ["vllm", "sglang", "sglang, ue8m0"])
def test_linears_of_one_input_are_one(row):
    recipe, options = ROWS[row]
    model = build(recipe)
    tensors = dict(quantized_tensors(model, **options))
    assert not any(key.startswith(f"{name}.") for key in tensors for parts in PARTS.values() for name in parts)
    for fused, parts in PARTS.items():
        codes, scale = (tensors[f"{fused}.{suffix}"] for suffix in ("weight", "weight_scale_inv"))
        want = torch.cat([whole(model, f"{part}.weight") for part in parts])
        if row == "sglang, ue8m0":
            rows = len(codes)
            assert scale.dtype == torch.int32 and scale.shape == (rows, 1) and scale.stride(0) == 1
            assert scale.stride(1) == rows + -rows % 4  # whole 16 bytes
            exponents = torch.stack([scale >> 8 * i & 255 for i in range(4)], -1).flatten(1)
            assert torch.equal(exponents, exponents[::128].repeat_interleave(128, 0)[:rows])
            assert not exponents[:, 2:].any()  # of columns that are not there
            scale = torch.exp2(exponents[::128, :2].float() - 127)
        assert_same_bits(decoded({"weight": codes, "weight_scale_inv": scale}, "float8_blockwise"), want)
    bias = torch.cat([getattr(model, part).bias for part in PARTS["qkv_proj"]]).detach().bfloat16()
    assert torch.equal(tensors["qkv_proj.bias"], bias)
    own = dict(quantized_tensors(model, **options, fused={}))
    assert "q_proj.weight" in own and "qkv_proj.weight" not in own


def test_packed_exponents_of_one_block_of_rows():
    model = qshard.quantize_(nn.ModuleDict({"few": nn.Linear(160, 96, bias=False)}), ROWS["sglang, ue8m0"][0])
    options = ROWS["sglang, ue8m0"][1]
    verify(quantized_tensors(model, **options), digests(model, **options))


def test_what_engines_cannot_run_as_one_is_refused():
    model = build(qshard.Float8BlockScaling())
    with pytest.raises(ValueError, match="layout 'deepseek-fp8' fuses nothing; `fused` is for vllm, sglang"):
        quantized_tensors(model, layout="deepseek-fp8", fused={})
    with pytest.raises(ValueError, match="down_proj.weight has 72 rows, and vllm runs it as a part of both, whose parts"):
        quantized_tensors(model, layout="vllm", fused={"both": ("down_proj", "down_proj")})
    with pytest.raises(ValueError, match="gate_proj.weight is quantized and gate.weight is plain, which vllm runs as one"):
        quantized_tensors(model, layout="vllm", fused={"both": ("gate_proj", "gate")})
    with pytest.raises(ValueError, match="layout 'vllm' has no weights of nvfp4 scaling"):
        quantized_tensors(build(qshard.NVFP4BlockScaling()), layout="vllm")


def test_ignored_modules_in_the_words_of_readers():
    model = build(qshard.Float8BlockScaling())
    assert ignored_modules(model, layout="vllm") == ["gate"]
    assert ignored_modules(model, layout="deepseek-fp8", names=lambda name: f"model.{name}") == ["model.gate"]
    (pattern,) = ignored_modules(model, layout="compressed-tensors")
    assert pattern == "re:gate$" and re.match(pattern[3:], "gate") and not re.match(pattern[3:], "gate_up_proj")
    with pytest.warns(UserWarning, match="gate is a part of the name gate_proj, which is quantized"):
        assert ignored_modules(model, layout="modelopt") == ["gate"]
    with pytest.raises(ValueError, match="qshard.checkpoint.ignored_modules: layout must be one of"):
        ignored_modules(model, layout="gguf")
