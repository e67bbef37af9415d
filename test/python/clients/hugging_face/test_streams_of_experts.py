"""Stacks of experts in streams and in low-bit files: a matrix for each expert and projection, and what engines hold."""

import contextlib
import json
import warnings

import pytest
import torch
import torch.distributed as dist
import transformers
from decoding import assert_same_bits, decoded
from dist_helpers import device, full_mesh, on_ranks, shared_folder
from moe_models import TINY
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import qshard
import qshard.integrations.transformers  # makes experts_implementation="qshard" known
from qshard.checkpoint import digests, load_quantized, quantized_tensors, save_quantized, verify

BUDGET_S = 60
ops = torch.ops.qshard
EXPERTS = 4


def build(format="float8_blockwise", width=128, seed=0, keep_master=True, ep=None, dims=(0, 0), **options):
    """ep: the mesh that cuts stacks by these dimensions, of gate_up_proj and down_proj."""
    config = transformers.Qwen3MoeConfig(
        **{**TINY, "intermediate_size": 128},
        num_experts=EXPERTS,
        moe_intermediate_size=width,
        head_dim=16,
        mlp_only_layers=[0],
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="qshard").to(device())
    if ep is not None:
        experts = model.model.layers[1].mlp.experts
        for name, dim in zip(("gate_up_proj", "down_proj"), dims):
            whole = getattr(experts, name)
            setattr(experts, name, torch.nn.Parameter(distribute_tensor(whole.data, ep, [Shard(dim)])))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"filter_fn": lambda m, name: "mlp" in name and "gate" != name[-4:], **options}
        qshard.quantize_(model, format, keep_master=keep_master, **options)
    return model


def of_experts(model):
    """fp32 of the codes of whole stacks, of a model on one device."""
    experts = model.model.layers[1].mlp.experts
    return {name: ops.dequantize(getattr(experts, name).detach(), dtype=torch.float32) for name in ("gate_up_proj", "down_proj")}


def assert_are(tensors, stacks, format):
    width = stacks["gate_up_proj"].shape[1] // 2
    want = {"gate_proj": stacks["gate_up_proj"][:, :width], "up_proj": stacks["gate_up_proj"][:, width:],
            "down_proj": stacks["down_proj"]}
    for projection, of_all in want.items():
        for expert in range(EXPERTS):
            module = f"model.layers.1.mlp.experts.{expert}.{projection}."
            planes = {k.removeprefix(module): t for k, t in tensors.items() if k.startswith(module)}
            assert_same_bits(decoded(planes, format), of_all[expert], module)


def sharded(format, cuts_matrices=False, **kwargs):
    """By FSDP2, cuts_matrices: with rows of each expert on each rank; on four ranks by an expert mesh of two under it."""
    rows = {"shard_placement_fn": lambda p: Shard(1) if p.dim() == 3 else None} if cuts_matrices else {}
    if dist.get_world_size() == 4:
        mesh = full_mesh(2, 2, names=("fsdp", "ep"))
        model = build(format, ep=mesh["ep"], tp_mesh=mesh["ep"] if cuts_matrices else None, **kwargs)
        fully_shard(model.model.layers[1].mlp.experts, mesh=mesh["fsdp"], **rows)
        return model, [model.model.layers[1].mlp.experts]
    model = build(format, **kwargs)
    for layer in model.model.layers:
        fully_shard(layer, **rows)
    fully_shard(model, **rows)
    return model, [model]


LAYOUTS = {
    "float8_blockwise": "deepseek-fp8",
    "float8_rowwise": "compressed-tensors",
    "mxfp8": "modelopt",
    "nvfp4": "modelopt",
}


@on_ranks(1, 2, 4)
def test_streams_files_and_digests_of_experts():
    placed = [(format, layout, False) for format, layout in LAYOUTS.items()]
    placed += [(format, LAYOUTS[format], True) for format in ("float8_blockwise", "float8_rowwise")]
    for format, layout, rows in placed:
        one = build(format)
        stacks, known = of_experts(one), digests(one, layout=layout)
        model, _ = sharded(format, rows)
        tensors = dict(quantized_tensors(model, layout=layout, bucket_bytes=100_000))
        assert not any(name.endswith(("gate_up_proj", "down_proj")) for name in tensors)
        assert_are(tensors, stacks, format)
        verify(tensors.items(), known)
        assert digests(model, layout=layout) == known
        if format == "nvfp4" and dist.get_world_size() == 1:
            continue
        with shared_folder() as folder:
            save_quantized(model, folder / "files", layout=layout)
            other, _ = sharded(format, rows, seed=1, keep_master=format != "mxfp8")
            load_quantized(other, folder / "files")
            assert digests(other, layout=layout) == known
            qshard.flush(other)
            assert digests(other, layout=layout) == known
            for name in ("gate_up_proj", "down_proj"):
                local = getattr(other.model.layers[1].mlp.experts, name)
                local = getattr(local, "_local_tensor", local).detach()
                assert torch.equal(local + 0, ops.dequantize(local)), name  # masters are the codes' values


@on_ranks(2, 4)
def test_experts_that_tensor_parallelism_cuts():
    """Cuts lie between blocks of the files; where they do not, streams have each matrix quantized as a whole."""
    mesh = full_mesh(dist.get_world_size() // 2, 2, names=("fsdp", "tp"))
    for format, layout in LAYOUTS.items():
        one = build(format, width=256)
        known, cut = digests(one, layout=layout), {"ep": mesh["tp"], "tp_mesh": mesh["tp"], "dims": (1, 2)}
        model = build(format, width=256, **cut)
        if dist.get_world_size() == 4:
            fully_shard(model.model.layers[1].mlp.experts, mesh=mesh["fsdp"])
        assert digests(model, layout=layout) == known, format
        verify(quantized_tensors(model, layout=layout), known)
        with shared_folder() as folder:
            save_quantized(model, folder / "files", layout=layout)
            other = build(format, width=256, seed=1, **cut)
            load_quantized(other, folder / "files")
            assert digests(other, layout=layout) == known, format
    model = build(width=128, **cut)
    is_first = dist.get_rank() == 0
    with pytest.warns(UserWarning, match="is quantized as a whole") if is_first else contextlib.nullcontext():
        assert dict(quantized_tensors(model, layout="deepseek-fp8"))


@on_ranks(1, 2)
def test_stacks_as_engines_hold_them():
    one = build()
    stacks = of_experts(one)
    model, _ = sharded("float8_blockwise")
    for layout in ("vllm", "sglang"):
        known = digests(one, layout=layout)
        tensors = dict(quantized_tensors(model, layout=layout))
        verify(tensors.items(), known)
        for name, of_all in (("w13", stacks["gate_up_proj"]), ("w2", stacks["down_proj"])):
            codes, scales = (tensors[f"model.layers.1.mlp.experts.{name}_{s}"] for s in ("weight", "weight_scale_inv"))
            assert codes.shape == of_all.shape
            assert scales.shape == (EXPERTS, *(-(-size // 128) for size in of_all.shape[1:]))
            for expert in range(EXPERTS):
                planes = {"weight": codes[expert], "weight_scale_inv": scales[expert]}
                assert_same_bits(decoded(planes, "float8_blockwise"), of_all[expert])


@on_ranks(2, 4)
def test_stacks_that_are_handed_out_after_quantize():
    """By an expert mesh, alone and under FSDP2: all of them, and those alone that parameter_fn takes."""
    gate_up = {
        "filter_fn": lambda module, name: name.endswith(".0.mlp.up_proj"),
        "parameter_fn": lambda parameter, name: name.endswith("gate_up_proj"),
    }
    shards = dist.get_world_size() // 2
    mesh = full_mesh(shards, 2, names=("fsdp", "ep"))
    for format, layout in LAYOUTS.items():
        for options in ({}, gate_up):
            known = digests(build(format, **options), layout=layout)
            model = build(format, **options)
            experts = model.model.layers[1].mlp.experts
            for name, parameter in list(experts.named_parameters()):
                part = distribute_tensor(parameter.detach(), mesh["ep"], [Shard(0)])
                experts.register_parameter(name, torch.nn.Parameter(part))
            if shards > 1:
                fully_shard(experts, mesh=mesh["fsdp"])
            tensors = dict(quantized_tensors(model, layout=layout))
            verify(tensors.items(), known)
            assert ("model.layers.1.mlp.experts.down_proj" in tensors) == bool(options)


@on_ranks(1, 2)
def test_packed_exponents_of_stacks():
    """Every row of an expert has its blocks' exponents, four to a word, stored by columns: as DeepGEMM reads them."""
    options = {"layout": "sglang", "scale_fmt": "ue8m0"}
    known = digests(build(width=640), **options)
    model, _ = sharded("float8_blockwise", width=640)
    tensors, plain = dict(quantized_tensors(model, **options)), dict(quantized_tensors(model, layout="sglang"))
    verify(tensors.items(), known)
    for part, rows, words in (("w13", 1280, 1), ("w2", 64, 2)):
        codes, packed = (tensors[f"model.layers.1.mlp.experts.{part}_weight{suffix}"] for suffix in ("", "_scale_inv"))
        scales = plain[f"model.layers.1.mlp.experts.{part}_weight_scale_inv"]
        assert torch.equal(codes.view(torch.uint8), plain[f"model.layers.1.mlp.experts.{part}_weight"].view(torch.uint8))
        assert packed.dtype == torch.int32 and packed.shape == (EXPERTS, rows, words)
        assert packed.stride() == (rows * words, 1, rows)
        for block in range(4 * words):
            exponents = packed[:, :, block // 4] >> 8 * (block % 4) & 255
            if block >= scales.shape[2]:
                assert not exponents.any()
                continue
            for row in range(0, rows, 64):
                want = scales[:, row // 128, block, None].expand(-1, 64)
                assert torch.equal(2.0 ** (exponents[:, row : row + 64].float() - 127), want)
    bad = [(name, t + 1 if name.endswith("w13_weight_scale_inv") else t) for name, t in tensors.items()]
    with pytest.raises(ValueError, match="w13_weight_scale_inv has other bytes"):
        verify(bad, known)


def test_gate_and_up_that_share_scale_blocks():
    """up is quantized as a whole, and is named."""
    model = build(width=96)
    with pytest.warns(UserWarning, match=r"gate_up_proj\[0\].up_proj and 3 more: begins inside a scale block of gate and up"):
        stream = quantized_tensors(model, layout="deepseek-fp8")
    assert [key[-8:] for key in stream.requantized] == [".up_proj"] * EXPERTS
    tensors = dict(stream)
    experts = model.model.layers[1].mlp.experts
    master = ops.master(experts.gate_up_proj.detach())[1]
    for first, projection in ((0, "gate_proj"), (96, "up_proj")):
        name = f"model.layers.1.mlp.experts.1.{projection}"
        got = decoded({s: tensors[f"{name}.{s}"] for s in ("weight", "weight_scale_inv")}, "float8_blockwise")
        alone = ops.dequantize(ops.quantize(master[first : first + 96].contiguous(), "float8_blockwise"))
        want = alone if first else of_experts(model)["gate_up_proj"][1, :96]
        assert_same_bits(got, want, projection)
    with pytest.raises(ValueError, match="gate_proj has 96 rows, and vllm runs it as a part of model.layers.1.mlp.experts.w13"):
        quantized_tensors(model, layout="vllm")


def test_transformers_reads_experts(tmp_path):
    """Its own loader puts the files' matrices together to stacks of codes, and dequantizes what is multiplied so here."""
    model = build()
    save_quantized(model, tmp_path, layout="deepseek-fp8")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "fp8"
    quantization = transformers.FineGrainedFP8Config(
        dequantize=True, modules_to_not_convert=config["quantization_config"]["modules_to_not_convert"]
    )
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantization, dtype=torch.float32)
    stacks = of_experts(model)
    for name, want in stacks.items():
        assert torch.equal(getattr(read.model.layers[1].mlp.experts, name), want), name


def test_stacks_of_unknown_modules_are_refused():
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = torch.nn.Parameter(ops.quantize(torch.randn(2, 128, 128), "float8_blockwise"))

    with pytest.raises(NotImplementedError, match=r"stack is a quantized stack of shape \(2, 128, 128\) in a Own, whose"):
        quantized_tensors(Own(), layout="deepseek-fp8")
