"""save_quantized."""

import contextlib
import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from qshard.checkpoint import files, layouts
from qshard.checkpoint.model import Entry, entries_of, own_class, plain_linears, unwrapped
from qshard.checkpoint.ranks import Ranks
from qshard.checkpoint.shard_regions import boxes_of, in_blocks
from qshard.formats import info_of
from qshard.model.quantize import flush
from qshard.model.scale_groups import siblings

ops = torch.ops.qshard
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
        float8_delayed, float8_blockwise, mxfp8, nvfp4; "modelopt" for mxfp8 and nvfp4.
    names: of parameters in files: a mapping or a function of names in the state_dict, without what
        DistributedDataParallel and torch.compile add to these. Linears left
        plain are listed in the config as those to ignore.
    max_file_bytes: files end before this, but for a single weight that is larger.
    scale_fmt: "ue8m0" writes the scales of "deepseek-fp8" as exponents, one byte each, and the config
        says so; a scale that is no power of two is an error.

    NVFP4 weights of q/k/v_proj, of gate/up_proj, of wq/wk/wv and of w1/w3 have one tensor scale in
    engines: where theirs differ they are quantized together, from their masters if kept, and a warning says
    so; after quantize_(..., share_tensor_scale=True) the files have the model's own codes. So are weights, each by itself, that tensor parallelism
    has cut inside scale blocks: blocks of the parts are none of the whole.
    Under DistributedDataParallel call it on one rank. Raises by name before anything is written.
    """
    tensors = list(model.state_dict(keep_vars=True).values())
    ranks = Ranks([t for t in tensors if isinstance(t, torch.Tensor)], _FUNCTION)
    directory = Path(directory)
    with ranks.agreeing():
        entries = entries_of(model, names)
    boxes = boxes_of(entries, ranks)
    with ranks.agreeing():
        ignore = plain_linears(model, names)
        plan = _Plan(entries, boxes, ignore, layout, max_file_bytes, scale_fmt)
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.glob("*.safetensors")):
            raise FileExistsError(f"{directory} holds safetensors files; give an empty directory")
        config = _model_config(model, directory)
    with torch.no_grad():
        flush(model)
        with ranks.agreeing():
            plan.check_scales()
        plan.group(ranks)
        _write(plan, directory, config, ranks)
    for said in plan.warnings if ranks.rank == 0 else []:
        warnings.warn(f"{_FUNCTION}: {said}", stacklevel=2)


@dataclass
class _Unit:
    """What one rank writes at once: a weight with its scales, weights quantized together, or a plain
    tensor."""

    entries: list[Entry]
    tensors: dict  # {name in file: (dtype, shape)}
    is_requantized: bool = False
    writer: int = 0
    file: int = 0

    @property
    def nbytes(self):
        return sum(files.nbytes(*spec) for spec in self.tensors.values())


class _Plan:
    """Equal on all ranks."""

    def __init__(self, entries, boxes, ignore, layout, max_file_bytes, scale_fmt):
        layouts.check(layout, scale_fmt)
        self.entries, self.boxes, self.ignore = entries, boxes, ignore
        self.max_file_bytes = max_file_bytes
        self.scheme, self.warnings = None, []
        for entry in self.entries:
            if entry.tensor.is_meta:
                raise ValueError(f"{entry.key} is on the meta device and has no values")
            if entry.is_quantized:
                scheme = layouts.scheme_for(layout, ops.format(entry.local), scale_fmt)
                if self.scheme not in (None, scheme):
                    raise ValueError(
                        f"{entry.key} has {scheme.family} scaling, others {self.scheme.family}; a "
                        "config names one"
                    )
                self.scheme = scheme
                scheme.check(entry.key, *entry.tensor.shape)
            else:
                files.check_dtype(entry.key, entry.tensor.dtype)
        if self.scheme is None:
            raise ValueError("no weight of this model is quantized; qshard.quantize_ does that")
        self._check_names()

    def _check_names(self):
        seen = set()
        for entry in self.entries:
            for name in self._specs(entry):
                if name in seen:
                    raise ValueError(f"names gives two tensors of a file the name {name!r}")
                seen.add(name)

    def check_scales(self):
        """Raises ValueError for scales that are to be written as exponents, and are none."""
        for entry in self.entries if self.scheme.is_ue8m0 else ():
            if not entry.is_quantized:
                continue
            scale = ops.scale_inv(entry.local)
            as_exponents = scale.to(torch.float8_e8m0fnu).float()
            is_exact = bool(((as_exponents == scale) | scale.isnan()).all())
            # A weight that is quantized again has other scales.
            is_again = not self.boxes[entry.key].is_aligned
            if not is_exact or is_again and "fp32_scale" in ops.format(entry.local):
                raise ValueError(
                    f"{entry.key} has scales that are not powers of two, which scale_fmt='ue8m0' does not "
                    "hold; leave it out, or quantize by Float8BlockScaling(), whose scales are"
                )

    def _specs(self, entry):
        if not entry.is_quantized:
            return {entry.name: (entry.tensor.dtype, tuple(entry.tensor.shape))}
        tensors = self.scheme.tensors(*entry.tensor.shape)
        return {f"{entry.module}.{suffix}": spec for suffix, spec in tensors.items()}

    def group(self, ranks):
        """Units, their writers and files."""
        cut = [e.key for e in self.entries if not self.boxes[e.key].is_aligned]
        if cut:
            self.warnings.append(
                f"{', '.join(cut)}: tensor parallelism has cut scale blocks of "
                "what readers take for one matrix: each is quantized as a whole, and the files' "
                "values are not those of the model's codes"
            )
        units, together = [], self._to_requantize(cut, ranks)
        in_group = {e.key: group for group in together for e in group}
        for entry in self.entries:
            group = in_group.get(entry.key, [entry])
            if group[0] is entry:
                tensors = {k: v for e in group for k, v in self._specs(e).items()}
                is_requantized = len(group) > 1 or entry.key in cut
                units.append(_Unit(group, tensors, is_requantized))
        filled = [0] * ranks.size
        for unit in sorted(units, key=lambda u: -u.nbytes):
            unit.writer = filled.index(min(filled))
            filled[unit.writer] += unit.nbytes
        count = 0
        for rank in range(ranks.size):
            size = None
            for unit in (u for u in units if u.writer == rank):
                if size is None or size + unit.nbytes > self.max_file_bytes:
                    count, size = count + 1, 0
                unit.file, size = count, size + unit.nbytes
        self.units, self.file_names = units, {
            i: f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)
        }

    def _to_requantize(self, cut, ranks):
        if self.scheme.tensor_scale is None:
            return []
        scales = {}
        for entry in self.entries:
            if entry.is_quantized and entry.local.shape[0]:
                scales[entry.key] = ops.tensor_scale_inv(entry.local).item()
        scales = {key: scale for known in reversed(ranks.all(scales)) for key, scale in known.items()}
        by_name = {e.module: e for e in self.entries if e.is_quantized}
        apart, cut_ones = [], []
        for members in siblings(by_name):
            if len({member.tensor.shape[1] for member in members}) > 1:
                continue  # not of one input
            if len({scales.get(member.key) for member in members}) > 1:
                apart.append(members)
            elif any(member.key in cut for member in members):
                cut_ones.append(members)  # by itself one might take another scale than the others
        if apart:
            first = ", ".join(e.key for e in apart[0])
            more = f", as {len(apart) - 1} more such groups," if len(apart) > 1 else ""
            self.warnings.append(
                f"{first}{more} have NVFP4 tensor scales of their own, where engines that fuse them read "
                "one: they are quantized together, and the files' values are not those of the model's "
                "codes. qshard.quantize_(model, recipe, share_tensor_scale=True), before training, makes the "
                "model train and write one scale"
            )
        return apart + cut_ones


def _write(plan, directory, config, ranks):
    writers, scales = {}, {}
    try:
        with ranks.agreeing():
            for file, name in plan.file_names.items():
                mine = [u for u in plan.units if u.file == file and u.writer == ranks.rank]
                if mine:
                    specs = {k: v for unit in mine for k, v in unit.tensors.items()}
                    writers[file] = files.FileWriter(directory, name, specs)
        with ranks.agreeing():
            for unit in plan.units:
                for name, tensor in (_tensors_of(unit, plan, ranks, scales) or {}).items():
                    writers[unit.file].write(name, tensor)
            for writer in writers.values():
                writer.close()
        with ranks.agreeing():
            for writer in writers.values():
                writer.finish()
        scales = {key: scale for known in ranks.all(scales) for key, scale in known.items()}
        with ranks.agreeing():
            if ranks.rank == 0:
                _write_json(plan, directory, config, scales)
    except BaseException:
        with contextlib.suppress(OSError):
            for writer in writers.values():
                writer.discard()
        raise


def _tensors_of(unit, plan, ranks, scales):
    """{name: tensor} on the unit's writer, None elsewhere."""
    entry = unit.entries[0]
    if not entry.is_quantized:
        boxes = plan.boxes[entry.key].holders(unit.writer)
        whole = _gather(entry.local, boxes, entry.tensor.shape, unit.writer, ranks)
        return None if whole is None else {entry.name: whole}
    if unit.is_requantized:
        planes = _requantized(unit, plan, ranks)
    else:
        planes = [_gathered(entry, plan, unit.writer, ranks)]
    if unit.writer != ranks.rank:
        return None
    result, scheme = {}, plan.scheme
    for entry, (codes, scale, tensor_scale) in zip(unit.entries, planes):
        specs = scheme.tensors(*entry.tensor.shape)
        scale = scale.to(torch.float8_e8m0fnu) if scheme.is_ue8m0 else scale
        tensors = {scheme.codes: codes, scheme.scale: scale}
        if scheme.tensor_scale:
            tensor_scale = tensor_scale.cpu()
            if scheme.divides:  # its reciprocal does not tell it: the index does
                scales[entry.name] = tensor_scale.item().hex()
                tensor_scale = tensor_scale.reciprocal()
            tensors[scheme.tensor_scale] = tensor_scale
        for suffix, (dtype, shape) in specs.items():
            tensor = tensors[suffix].contiguous()
            tensor = tensor.view(dtype) if tensor.dtype.itemsize == dtype.itemsize else tensor
            result[f"{entry.module}.{suffix}"] = tensor.reshape(shape)
    return result


def _gather(local, boxes, shape, writer, ranks):
    """A tensor of the parts that the ranks of `boxes` hold; None where this rank is not the writer.
    Boxes that overlap, as those of scales of blocks of several ranks, hold the same."""
    counts = {rank: torch.Size(n for _, n in box) for rank, box in boxes.items()}
    sources = {rank: sizes.numel() * local.dtype.itemsize for rank, sizes in counts.items()}
    pieces = ranks.gather(local, sources, writer)
    if pieces is None or writer != ranks.rank:
        return None
    return _whole(pieces, boxes.values(), counts.values(), local.dtype, shape)


def _whole(pieces, boxes, counts, dtype, shape):
    if len(pieces) == 1:
        return pieces[0].view(dtype).reshape(shape)
    whole = torch.empty(shape, dtype=dtype, device=pieces[0].device)
    for piece, box, sizes in zip(pieces, boxes, counts):
        if sizes.numel():
            at = tuple(slice(first, first + count) for first, count in box)
            whole[at] = piece.view(dtype).reshape(sizes)
    return whole


def _gathered(entry, plan, writer, ranks):
    """(codes, scale_inv, tensor_scale_inv) of the whole weight on the writer."""
    boxes, local, scheme = plan.boxes[entry.key].holders(writer), entry.local, plan.scheme
    rows, columns = entry.tensor.shape

    def plane(piece, block):
        """One entry per block."""
        of_blocks = {rank: in_blocks(box, block) for rank, box in boxes.items()}
        # Rows that no rank has matter to no box.
        of_blocks = {
            rank: box if all(n for _, n in box) else ((0, 0), (0, 0))
            for rank, box in of_blocks.items()
        }
        shape = -(-rows // block[0]), -(-columns // block[1])
        return _gather(piece, of_blocks, shape, writer, ranks)

    whole = rows, columns
    codes = plane(ops.codes(local), (1, scheme.codes_per_byte))
    scale = plane(ops.scale_inv(local), scheme.block_within(rows, columns))
    has_outer = info_of(ops.format(local)).outer_scale is not None
    tensor_scale = plane(ops.tensor_scale_inv(local), whole) if has_outer else None
    return codes, scale, tensor_scale


def _requantized(unit, plan, ranks):
    """Planes of weights as one matrix, which has one tensor scale. Blocks end where a weight does."""
    values, windows, end = [], [], 0
    for entry in unit.entries:
        local = entry.local
        kept = ops.master(local)
        value = kept if kept is not None else ops.dequantize(local, dtype=torch.float32)
        boxes = plan.boxes[entry.key].holders(unit.writer)
        value = _gather(value, boxes, entry.tensor.shape, unit.writer, ranks)
        if value is None:
            continue
        padding = -value.shape[0] % 16 if len(unit.entries) > 1 else 0
        values.append(nn.functional.pad(value.float(), (0, 0, 0, padding)))
        windows.append((end, end + value.shape[0]))
        end += value.shape[0] + padding
    if not values:
        return None
    format = ops.format(unit.entries[0].local).partition("[")[0]
    whole = ops.quantize(torch.cat(values), format)
    codes, scale = ops.codes(whole), ops.scale_inv(whole)
    tensor_scale = ops.tensor_scale_inv(whole) if plan.scheme.tensor_scale else None
    if len(windows) == 1:
        return [(codes, scale, tensor_scale)]
    return [(codes[a:b], scale[a:b], tensor_scale) for a, b in windows]


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


def _write_json(plan, directory, config, scales):
    weight_map = {
        name: plan.file_names[unit.file] for unit in plan.units for name in unit.tensors
    }
    metadata = {"total_size": sum(unit.nbytes for unit in plan.units)}
    if scales:
        metadata["qshard.tensor_scale_inv"] = scales
    config = {**config, "quantization_config": plan.scheme.quantization_config(plan.ignore)}
    files.write_json(directory / "config.json", config)
    hf_quant_config = plan.scheme.hf_quant_config(plan.ignore)
    if hf_quant_config:
        files.write_json(directory / "hf_quant_config.json", hf_quant_config)
    # Last: a directory with an index is whole.
    files.write_json(
        directory / files.INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    )
