"""save_quantized."""

import contextlib
import json
import warnings
from pathlib import Path

from torch import nn

from qshard.checkpoint import files, layouts
from qshard.checkpoint.model import entries_of, own_class, plain_linears, unwrapped
from qshard.checkpoint.plan import Plan
from qshard.checkpoint.ranks import Ranks
from qshard.checkpoint.shard_regions import boxes_of, own_boxes
from qshard.checkpoint.stream import TensorStream, settle

_FUNCTION = "qshard.checkpoint.save_quantized"


def save_quantized(
    model: nn.Module,
    directory,
    *,
    layout: str,
    names=None,
    max_file_bytes: int = 5 * 10**9,
    scale_fmt: str = "float",
) -> None:
    """Writes a model's codes and scales as inference engines read them: safetensors files with an
    index, and config.json with its quantization_config, beside what is there or `model.config`
    gives, and with the model's class as its architectures if it has none. Values are those of the codes, not of masters.

    model: plain, or after `fully_shard`, `parallelize_module` or both: then a collective of all ranks
        of its meshes, which see one directory. Each rank writes files of its own, and gathers one weight at a time
        for them.
    directory: made if need be; one that holds safetensors files is an error.
    layout: "deepseek-fp8" for float8_blockwise; "compressed-tensors" for float8_tensorwise,
        float8_delayed, float8_rowwise, float8_blockwise, mxfp8, nvfp4; "modelopt" for mxfp8 and nvfp4.
    names: of parameters in files: a mapping or a function of names in the state_dict, without what
        DistributedDataParallel and torch.compile add to these. Linears left
        plain are listed in the config as those to ignore.
    max_file_bytes: files end before this, but for a single weight that is larger.
    scale_fmt: "ue8m0" writes the scales of "deepseek-fp8" as exponents, one byte each, and the config
        says so; a scale that is no power of two is an error.

    NVFP4 weights of q/k/v_proj, of gate/up_proj, of wq/wk/wv and of w1/w3 have one tensor scale in
    engines: where theirs differ they are quantized together, from their masters if kept, and a warning says
    so; after quantize_(..., share_tensor_scale=True) the files have the model's own codes. So are weights, each by itself, that
    tensor parallelism has cut inside scale blocks: blocks of the parts are none of the whole.
    A stack of experts is a matrix (out, in) for each expert and projection, <experts>.<number>.gate_proj.weight; of stacks
    (in, out), which Llama 4 has, in formats of square blocks or one scale.
    Under DistributedDataParallel call it on one rank. Raises by name before anything is written.
    """
    ranks = Ranks.of_model(model, _FUNCTION)
    directory = Path(directory)
    with ranks.agreeing() as models:
        entries = entries_of(model, names)
        models.tell(own_boxes(entries))
    with ranks.agreeing():
        boxes = boxes_of(entries, models.everywhere, ranks)
    with ranks.agreeing() as plans:
        ignore = plain_linears(model, names)
        layouts.check(layout, scale_fmt, layouts.LAYOUTS)
        plan = Plan(entries, boxes, layout, scale_fmt, "the files' values")
        for entry in entries:
            if not entry.is_quantized:
                files.check_dtype(entry.key, entry.tensor.dtype)
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.glob("*.safetensors")):
            raise FileExistsError(f"{directory} holds safetensors files; give an empty directory")
        config = _model_config(model, directory)
        plans.tell(plan.order)
    settle(plan, model, ranks, plans.everywhere)
    file_names = _assign_files(plan, ranks, max_file_bytes)
    _write(plan, file_names, directory, config, ignore, ranks)
    for said in plan.warnings if ranks.rank == 0 else []:
        warnings.warn(f"{_FUNCTION}: {said}", stacklevel=2)


def _assign_files(plan, ranks, max_file_bytes):
    """{number: name}; gives each unit its writer and file."""
    filled = [0] * ranks.size
    for unit in sorted(plan.units, key=lambda u: -u.nbytes):
        unit.writer = filled.index(min(filled))
        filled[unit.writer] += unit.nbytes
    count = 0
    for rank in range(ranks.size):
        size = None
        for unit in (u for u in plan.units if u.writer == rank):
            if size is None or size + unit.nbytes > max_file_bytes:
                count, size = count + 1, 0
            unit.file, size = count, size + unit.nbytes
    return {i: f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)}


def _write(plan, file_names, directory, config, ignore, ranks):
    writers, scales = {}, {}
    try:
        with ranks.agreeing():
            for file, name in file_names.items():
                mine = [u for u in plan.units if u.file == file and u.writer == ranks.rank]
                if mine:
                    specs = {k: v for unit in mine for k, v in unit.tensors.items()}
                    writers[file] = files.FileWriter(directory, name, specs)
        file_of = {name: unit.file for unit in plan.units for name in unit.tensors}
        one_by_one = [[unit] for unit in plan.units]
        with ranks.agreeing():
            for name, tensor in TensorStream(
                plan, ranks, one_by_one, lambda bucket: bucket[0].writer, agrees=True, exact=scales
            ):
                writers[file_of[name]].write(name, tensor)
            for writer in writers.values():
                writer.close()
        with ranks.agreeing():
            for writer in writers.values():
                writer.finish()
        scales = {key: scale for known in ranks.all(scales) for key, scale in known.items()}
        with ranks.agreeing():
            if ranks.rank == 0:
                _write_json(plan, file_names, directory, config, ignore, scales)
    except BaseException:
        with contextlib.suppress(OSError):
            for writer in writers.values():
                writer.discard()
        raise


def _model_config(model, directory):
    model = unwrapped(model)
    config = getattr(model, "config", None)
    if (directory / "config.json").is_file():
        config = files.read_json(directory / "config.json")
    elif hasattr(config, "to_json_string"):  # transformers'
        config = json.loads(config.to_json_string(use_diff=False))
    else:
        config = {}
    if not config.get("architectures"):  # of a model that was not loaded, transformers' says none
        config["architectures"] = [own_class(model).__name__]
    return config


def _write_json(plan, file_names, directory, config, ignore, scales):
    weight_map = {
        name: file_names[unit.file] for unit in plan.units for name in unit.tensors
    }
    metadata = {"total_size": sum(unit.nbytes for unit in plan.units)}
    if scales:
        metadata["qshard.tensor_scale_inv"] = scales
    config = {**config, "quantization_config": plan.scheme.quantization_config(ignore)}
    files.write_json(directory / "config.json", config)
    hf_quant_config = plan.scheme.hf_quant_config(ignore)
    if hf_quant_config:
        files.write_json(directory / "hf_quant_config.json", hf_quant_config)
    # Last: a directory with an index is whole.
    files.write_json(
        directory / files.INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    )
