"""A model for low-bit checkpoints, written by two FSDP2 ranks, and what its values are."""

import contextlib
import json
import pkgutil
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dist_helpers import World, full_mesh
from models.weights import full_tensor
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import qshard
from qshard.checkpoint import files, load_quantized, save_quantized

ops = torch.ops.qshard
# (layout, recipe): every row of the table in docs/low-bit-checkpoints.md.
ROWS = {
    "deepseek-fp8": ("deepseek-fp8", qshard.Float8BlockScaling()),
    "deepseek-fp8, ue8m0": ("deepseek-fp8", qshard.Float8BlockScaling()),
    "deepseek-fp8, fp32 scales": ("deepseek-fp8", qshard.Float8BlockScaling(use_f32_scales=True)),
    "compressed-tensors, tensor": ("compressed-tensors", qshard.Float8CurrentScaling()),
    "compressed-tensors, delayed": ("compressed-tensors", qshard.DelayedScaling(amax_history_len=3)),
    "compressed-tensors, channel": ("compressed-tensors", qshard.Float8RowwiseScaling()),
    "compressed-tensors, channel, fp32 scales": (
        "compressed-tensors", qshard.Float8RowwiseScaling(use_f32_scales=True)
    ),
    "compressed-tensors, block": ("compressed-tensors", qshard.Float8BlockScaling()),
    "compressed-tensors, mxfp8": ("compressed-tensors", qshard.MXFP8BlockScaling()),
    "compressed-tensors, nvfp4": ("compressed-tensors", qshard.NVFP4BlockScaling()),
    "modelopt, mxfp8": ("modelopt", qshard.MXFP8BlockScaling(weight_block=(1, 32))),
    "modelopt, nvfp4": ("modelopt", qshard.NVFP4BlockScaling(disable_2d_quantization=True)),
}
OPTIONS = {"deepseek-fp8, ue8m0": dict(scale_fmt="ue8m0")}  # of save_quantized


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(256, 256)
        self.k_proj = nn.Linear(256, 96, bias=False)
        self.o_proj = nn.Linear(256, 160, bias=False)

    def forward(self, x):
        return self.o_proj(self.q_proj(x)) + self.k_proj(x).mean(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])
        self.norm = nn.LayerNorm(160)
        self.lm_head = nn.Linear(160, 7)
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x):
        return self.lm_head(self.norm(self.layers[0](x) + self.layers[1](x)))


def is_weight(module, name):
    return name.endswith("_proj")


def build(row, seed=0, sharded=True, share=True, **kwargs):
    """share: q and k have one NVFP4 tensor scale, as if trained so."""
    torch.manual_seed(seed)
    model = Model()
    with torch.no_grad():
        for layer in model.layers:
            for weight in (layer.q_proj.weight, layer.k_proj.weight):
                weight[0, 0] = 0.5 if share else weight.shape[0] / 100
    qshard.quantize_(model, ROWS[row][1], filter_fn=is_weight, **kwargs)
    if sharded:
        mesh = full_mesh()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def whole(tensor):
    """A plain tensor of the codes' values, on all ranks."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if qshard.is_quantized(tensor):
        local = ops.dequantize(local, dtype=torch.float32)
    return full_tensor(local.detach(), tensor)


def code_values(model):
    return {name: whole(tensor) for name, tensor in model.state_dict(keep_vars=True).items()
            if "history" not in name and "scaling_amax" not in name}


def masters(model):
    return {name: p.to_local().clone() if isinstance(p, DTensor) else p.clone()
            for name, p in model.named_parameters()}


def save(row, directory, **kwargs):
    """On each rank of an FSDP2 world; the codes' values."""
    share, quantize = kwargs.pop("share", True), kwargs.pop("quantize", {})
    kwargs = {**OPTIONS.get(row, {}), **kwargs}
    model = build(row, share=share, **quantize)
    model(torch.randn(4, 256)).sum()  # as after training: the root's parameters are unsharded
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save_quantized(model, directory, layout=ROWS[row][0], **kwargs)
    said = [str(w.message) for w in caught if "quantized together" in str(w.message)]
    return code_values(model), said


def load(row, directory, keep_master=True, sharded=True, **kwargs):
    """On each rank of another world; the codes' values, before and after another flush."""
    model = build(row, seed=1, sharded=sharded, keep_master=keep_master)
    load_quantized(model, directory, **kwargs)
    values = code_values(model)
    qshard.flush(model)
    for name, value in code_values(model).items():
        assert torch.equal(value, values[name]), name
    for name, parameter in model.named_parameters():
        if qshard.is_quantized(parameter) and keep_master:
            local = parameter.to_local() if sharded else parameter
            assert torch.equal(local + 0, ops.dequantize(local)), name
    if sharded:
        model(torch.randn(4, 256)).sum()
    return values


def load_wrong(row, directory, recipe_row=None):
    """The error of loading, after which the model is what it was."""
    model = build(recipe_row or row, seed=1)
    before = masters(model), code_values(model)
    try:
        load_quantized(model, directory)
        error = "none"
    except Exception as met:
        error = f"{type(met).__name__}: {met}"
    for then, now in ((before[0], masters(model)), (before[1], code_values(model))):
        for name in then:
            assert torch.equal(then[name], now[name]), name
    return error


def save_wrong(directory, layout, kwargs, row):
    model = build(row)
    try:
        save_quantized(model, directory, layout=layout, **kwargs)
    except Exception as met:
        return f"{type(met).__name__}: {met}"
    return "none"


def memory_of_save(row, directory):
    """(bytes above the model's own at most, those of the largest tensor in the rank's files)"""
    model = build(row)
    written, write = [], files.FileWriter.write

    def noted(self, key, tensor):
        written.append(tensor.nbytes)
        write(self, key, tensor)

    activities = [torch.profiler.ProfilerActivity.CPU]
    with mock.patch.object(files.FileWriter, "write", noted):
        with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
            save_quantized(model, directory, layout=ROWS[row][0], **OPTIONS.get(row, {}))
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak, max(written)


def save_failing(row, directory, place, error):
    """The error of a save in which rank 1 meets one."""
    model = build(row)
    module, _, name = place.rpartition(".")
    owner = pkgutil.resolve_name(f"qshard.checkpoint.{module}")
    failing = mock.patch.object(owner, name, side_effect=error)
    with failing if dist.get_rank() == 1 else contextlib.nullcontext():
        try:
            save_quantized(model, directory, layout=ROWS[row][0])
        except Exception as met:
            return f"{type(met).__name__}: {met}"
    return "none"


# ---------------------------------------------------------------- for readers


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """saved(row): the directory that two ranks wrote, the model's values, the files' tensors, and
    config.json's entry."""
    from safetensors.torch import load_file

    known = {}

    def of(row):
        if row not in known:
            directory = tmp_path_factory.mktemp("model")
            values = World("cpu", 2).run(save, row, directory)[0][0]
            tensors = {k: v for f in directory.glob("*.safetensors") for k, v in load_file(f).items()}
            config = json.loads((directory / "config.json").read_text())["quantization_config"]
            known[row] = directory, values, tensors, config
        return known[row]

    return of


def weights(tensors, *suffixes):
    """(module, its tensors of these suffixes)"""
    end = f"_proj.{suffixes[0]}"
    modules = sorted(k.removesuffix(f".{suffixes[0]}") for k in tensors if k.endswith(end))
    assert len(modules) == 6
    for module in modules:
        yield module, *(tensors[f"{module}.{suffix}"] for suffix in suffixes)


# ---------------------------------------------------------------- on other meshes


def refused(directory):
    """What a rank is told of saving and of loading a model without values."""
    row = "deepseek-fp8"
    with torch.device("meta"):
        model = Model()
    qshard.quantize_(model, ROWS[row][1], filter_fn=is_weight)
    fully_shard(model, mesh=full_mesh())
    errors = []
    for call in (
        lambda: save_quantized(model, directory / "new", layout=ROWS[row][0]),
        lambda: load_quantized(model, directory),
    ):
        try:
            call()
            errors.append("none")
        except Exception as met:
            errors.append(f"{type(met).__name__}: {met}")
    return errors


def assert_equal_tensors(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name
