"""Stacks (experts, in, out), which Llama 4 of transformers has: in files and streams each expert's matrices lie as (out, in)."""

import warnings

import pytest
import torch
import torch.distributed as dist
import transformers
from decoding import assert_same_bits, decoded
from dist_helpers import device, full_mesh, on_ranks, shared_folder
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import qshard
from qshard.checkpoint import digests, ignored_modules, load_quantized, quantized_tensors, save_quantized, verify

ops = torch.ops.qshard
EXPERTS, NAMES = 3, ("gate_up_proj", "down_proj")
PLACE = "model.layers.1.feed_forward.experts"
# (format, layout, hidden size, size of experts): where blocks may, they end inside a matrix.
CASES = [
    ("float8_tensorwise", "compressed-tensors", 72, 40),
    ("float8_delayed", "compressed-tensors", 64, 33),
    ("float8_blockwise", "deepseek-fp8", 136, 256),
    ("float8_blockwise_fp32_scale", "compressed-tensors", 192, 128),
    ("mxfp8", "compressed-tensors", 96, 64),
    ("nvfp4", "modelopt", 80, 48),
]


def build(format, hidden=128, width=128, seed=0, ep=None, keep_master=True):
    config = transformers.Llama4TextConfig(
        vocab_size=32, hidden_size=hidden, intermediate_size=width, intermediate_size_mlp=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=16, num_local_experts=EXPERTS, interleave_moe_layer_step=2,
        max_position_embeddings=64, pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).to(device())
    experts = experts_of(model)
    if ep is not None:
        for name in NAMES:
            setattr(experts, name, torch.nn.Parameter(distribute_tensor(getattr(experts, name).data, ep, [Shard(0)])))
    takes = {"filter_fn": lambda *_: False, "parameter_fn": lambda p, name: name.startswith(PLACE)}
    qshard.quantize_(model, format, keep_master=keep_master, **takes)
    return model


def experts_of(model):
    return model.model.layers[1].feed_forward.experts


def sharded(how, format, *sizes, **options):
    """By FSDP2, or by an expert mesh, or on one rank."""
    if how == "expert mesh":
        return build(format, *sizes, ep=full_mesh(), **options)
    model = build(format, *sizes, **options)
    if how == "FSDP2":
        fully_shard(model.model.layers[1])
        fully_shard(model)
    return model


def ways():
    return ["FSDP2", "expert mesh"] if dist.get_world_size() > 1 else ["one rank"]


def locals_of(model):
    stacks = (getattr(experts_of(model), name) for name in NAMES)
    return [getattr(stack, "_local_tensor", stack).detach() for stack in stacks]


def planes_of(stack):
    planes = [ops.codes(stack), ops.scale_inv(stack)]
    planes += [ops.tensor_scale_inv(stack)] if ops.format(stack).startswith("nvfp4") else []
    return [plane.float() if plane.dtype != torch.uint8 else plane for plane in planes]


def wanted(model):
    """{projection: fp32 (experts, out, in) of the codes} of a model on one device."""
    first, down = (ops.dequantize(stack, dtype=torch.float32).mT for stack in locals_of(model))
    gate, up = first.chunk(2, 1)
    return {"gate_proj": gate, "up_proj": up, "down_proj": down}


@on_ranks(1, 2)
def test_files_streams_and_digests():
    for number, (format, layout, *sizes) in enumerate(CASES):
        one, how = build(format, *sizes), ways()[number % len(ways())]
        model, known = sharded(how, format, *sizes), digests(one, layout=layout)
        with quantized_tensors(model, layout=layout) as stream:
            tensors = dict(stream)
        for projection, of_all in wanted(one).items():
            for expert, want in enumerate(of_all):
                module = f"{PLACE}.{expert}.{projection}."
                planes = {name.removeprefix(module): t for name, t in tensors.items() if name.startswith(module)}
                assert_same_bits(decoded(planes, format), want, module)
        assert not any(name.endswith(NAMES) for name in tensors)
        verify(tensors.items(), known)
        assert digests(model, layout=layout) == known
        if how != "one rank":  # codes and scales of two experts, or of one, go to the other rank
            quantized = sum(t.nbytes for name, t in tensors.items() if name.startswith(PLACE))
            assert quantized / 3 <= stream.sent().quantized < quantized * 2 / 3 + 4096, format
        with shared_folder() as folder:
            save_quantized(model, folder / "files", layout=layout)
            for other_way, keep_master in zip(reversed(ways() * 2), (True, False)):
                other = sharded(other_way, format, *sizes, seed=1, keep_master=keep_master)
                load_quantized(other, folder / "files")
                for _ in range(2):
                    for stack, loaded in zip(locals_of(model), locals_of(other)):
                        for plane, same in zip(planes_of(stack), planes_of(loaded), strict=True):
                            assert_same_bits(same, plane, format)
                        assert torch.equal(loaded + 0, ops.dequantize(loaded))  # masters are the codes' values
                    qshard.flush(other)


@on_ranks(1, 2)
def test_stacks_as_engines_hold_them():
    one = build("float8_blockwise", 136, 256)
    model, want = sharded(ways()[0], "float8_blockwise", 136, 256), wanted(one)
    for layout, options in (("vllm", {}), ("sglang", {}), ("sglang", {"scale_fmt": "ue8m0"})):
        tensors = dict(quantized_tensors(model, layout=layout, **options))
        verify(tensors.items(), digests(one, layout=layout, **options))
        for name, parts in (("w13", ("gate_proj", "up_proj")), ("w2", ("down_proj",))):
            codes, scales = (tensors[f"{PLACE}.{name}_{suffix}"] for suffix in ("weight", "weight_scale_inv"))
            if options:  # int32 of four exponents, which verify has unpacked
                assert scales.dtype == torch.int32
                continue
            for expert in range(EXPERTS):
                got = decoded({"weight": codes[expert], "weight_scale_inv": scales[expert]}, "float8_blockwise")
                assert_same_bits(got, torch.cat([want[part][expert] for part in parts]))


@pytest.mark.parametrize("format", ["float8_tensorwise", "float8_blockwise", "mxfp8", "nvfp4"])
def test_transformers_reads_experts(format, tmp_path):
    """With compressed-tensors it runs Llama 4's experts as linears, one for each expert and projection."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    model = build(format)
    save_quantized(model, tmp_path, layout="compressed-tensors")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        read(torch.zeros(1, 4, dtype=torch.long))  # which decompresses weights
    for projection, of_all in wanted(model).items():
        for expert, want in enumerate(of_all):
            got = getattr(experts_of(read)[expert], projection).weight.float()
            # Its NVFP4 divides by a rounded reciprocal, in bf16.
            torch.testing.assert_close(got, want, rtol=2**-7 if format == "nvfp4" else 0, atol=0)


def test_gate_and_up_that_share_scale_blocks(tmp_path):
    model = build("float8_blockwise", 136, 96)
    with pytest.warns(UserWarning, match=r"gate_up_proj\[0\].up_proj and 2 more: begins inside a scale block"):
        tensors = dict(quantized_tensors(model, layout="deepseek-fp8"))
    up = ops.master(experts_of(model).gate_up_proj.detach())[2, :, 96:].T.contiguous()
    name, want = f"{PLACE}.2.up_proj", ops.dequantize(ops.quantize(up, "float8_blockwise"))
    assert_same_bits(decoded({s: tensors[f"{name}.{s}"] for s in ("weight", "weight_scale_inv")}, "float8_blockwise"), want)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_quantized(model, tmp_path, layout="deepseek-fp8")
    with pytest.raises(NotImplementedError, match="inside a scale block of the files, where gate and up lie"):
        load_quantized(model, tmp_path)


def test_scales_that_the_transpose_has_not_are_refused(tmp_path):
    """Files of others may have a scale for each row of a block."""
    model = build("mxfp8")
    save_quantized(model, tmp_path, layout="modelopt")
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    tensors[f"{PLACE}.2.down_proj.weight_scale"][5, 0] += 1
    save_file(tensors, file)
    other = build("mxfp8", seed=1)
    before = [stack.clone() for stack in locals_of(other)]
    with pytest.raises(ValueError, match=r"down_proj\[2\].down_proj: .* rows within such blocks differ in theirs"):
        load_quantized(other, tmp_path)
    assert all(torch.equal(stack + 0, then) for stack, then in zip(locals_of(other), before))


def test_an_odd_number_of_columns_has_no_nibbles_to_load(tmp_path):
    takes = {"filter_fn": lambda *_: False, "parameter_fn": lambda p, name: name == f"{PLACE}.down_proj"}
    models = [qshard.dequantize_(build("float8_tensorwise", 65, 32, seed)) for seed in range(2)]
    for model in models:
        qshard.quantize_(model, "nvfp4", **takes)
    save_quantized(models[0], tmp_path, layout="modelopt")
    with pytest.raises(ValueError, match="down_proj has 65 columns, and two codes lie in a byte"):
        load_quantized(models[1], tmp_path)


CALLS = {
    "save": lambda model: save_quantized(model, "nowhere", layout="compressed-tensors"),
    "stream": lambda model: quantized_tensors(model, layout="compressed-tensors"),
    "digests": lambda model: digests(model, layout="compressed-tensors"),
    "load": lambda model: load_quantized(model, "nowhere"),
    "ignored": lambda model: ignored_modules(model, layout="compressed-tensors"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("format", ["float8_rowwise", "mxfp8_1x32", "nvfp4_1x16"])
def test_formats_with_scales_along_rows_are_refused(format, call):
    with pytest.raises(NotImplementedError, match=f"gate_up_proj has matrices .in, out. .*'{format}' has scales along their rows"):
        CALLS[call](build(format, 32, 32))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["gpt_oss", "aria"])
def test_experts_that_no_reader_takes_are_refused(kind, call):
    if kind == "gpt_oss":
        config = transformers.GptOssConfig(hidden_size=32, intermediate_size=32, num_local_experts=2)
        experts = transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts(config)
    else:
        config = transformers.AriaTextConfig(hidden_size=32, intermediate_size=32, moe_num_experts=2)
        experts = transformers.models.aria.modeling_aria.AriaExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    model = torch.nn.ModuleDict({"experts": experts})
    qshard.quantize_(model, "float8_tensorwise")
    with pytest.raises(NotImplementedError, match=f"gate_up_proj has matrices .in, out. in a {type(experts).__name__}, whose"):
        CALLS[call](model)
