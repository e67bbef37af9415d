"""load_quantized."""

import warnings
from pathlib import Path

import torch
from torch import nn

from qshard._runtime.classes import TensorState
from qshard._runtime.hooks import local_of
from qshard.checkpoint import experts, files, layouts
from qshard.checkpoint.model import entries_of
from qshard.checkpoint.ranks import Ranks
from qshard.checkpoint.shard_regions import boxes_of, in_blocks, own_boxes
from qshard.formats import info_of
from qshard.model.choosing import some
from qshard.model.quantize import flush
from qshard.model.state_buffers import copy_values

ops = torch.ops.qshard
_FUNCTION = "qshard.checkpoint.load_quantized"


def load_quantized(model: nn.Module, directory, *, names=None) -> None:
    """Reads a checkpoint of codes and scales, of `save_quantized` or from elsewhere, into a model, in
    place. Codes and scales come in as they are; masters become what they stand for.

    model: with values (not on meta), quantized by the recipe of the files' blocks:
        Float8BlockScaling(use_f32_scales=True) for scales that are not powers of two. Plain, or after
        `fully_shard`, `parallelize_module` or both, on any number of ranks: then a collective of all
        ranks of its meshes, each of which reads the rows and columns that it holds. Where tensor parallelism cuts
        inside scale blocks, values come in and are quantized, and a warning says so.
    directory: config.json, whose quantization_config names the layout, and safetensors files with an
        index or without.
    names: as for `save_quantized`.

    Every parameter and persistent buffer must be there with its shape, and nothing else. What is wrong
    is raised by name, on all ranks, before the model is changed.
    """
    ranks = Ranks.of_model(model, _FUNCTION)
    with ranks.agreeing() as models:
        entries = entries_of(model, names)
        models.tell(own_boxes(entries))
    with ranks.agreeing():
        boxes = boxes_of(entries, models.everywhere, ranks)
        loads = _checked_loads(entries, boxes, Path(directory), ranks)
    with torch.no_grad():
        for load in loads:
            load()
        cut = [key for key, of_key in boxes.items() if not of_key.is_aligned]
        if cut:
            flush(model)
    if cut and ranks.rank == 0:
        warnings.warn(
            f"{_FUNCTION}: {', '.join(cut)}: tensor parallelism cuts scale blocks of the files: "
            "their values are quantized in blocks of each part, and the model's values are not those "
            "of the files' codes",
            stacklevel=2,
        )


def _checked_loads(entries, boxes, directory, ranks):
    """Functions that load one tensor each, and have no reason left to fail."""
    config = files.read_json(directory / "config.json")
    if "quantization_config" not in config:
        raise ValueError("config.json has no quantization_config; load_state_dict loads plain files")
    layout = layouts.layout_of(config["quantization_config"])
    scale_fmt = config["quantization_config"].get("scale_fmt", "float")
    reader = files.Reader(directory)
    loads, used = [], set()
    stacks = {}
    for entry in entries:
        if entry.tensor.is_meta:
            raise ValueError(f"{entry.key} is on the meta device; call model.to_empty(device=...) first")
        kind = _QuantizedLoad if entry.is_quantized else _PlainLoad
        load = kind(entry, boxes[entry.key], reader, (layout, scale_fmt), ranks)
        used.update(load.names)
        if entry.part is None:
            loads.append(load)
        else:
            stacks.setdefault(entry.part.key, []).append(load)
    loads += [_StackLoad(parts) for parts in stacks.values()]
    unused = sorted(set(reader.names) - used)
    if unused:
        raise ValueError(f"the files hold {some(unused)}, which this model has no place for")
    for load in loads:
        load.check_numbers()
    return loads


def _check(reader, name, key, shapes, dtypes):
    if name not in reader.names:
        raise ValueError(f"the files have no {name}, for {key}")
    shape, dtype = reader.shape_and_dtype(name)
    if shape not in shapes or dtype not in dtypes:
        raise ValueError(
            f"{name} is {dtype} {list(shape)} in the files; {key} needs {' or '.join(dtypes)} "
            f"{list(shapes[0])}"
        )


def _blocks_around(window, matrix, block):
    """(first, count) of the whole blocks, of those that begin with `matrix`, around a window in it."""
    (first, count), (start, size) = window, matrix
    if count == 0:
        return first - (first - start) % block, 0
    begin = start + (first - start) // block * block
    end = start + min(-(-(first + count - start) // block) * block, size)
    return begin, end - begin


class _PlainLoad:
    def __init__(self, entry, boxes, reader, layout, ranks):
        self.entry, self.reader, self.names = entry, reader, [entry.name]
        files.check_dtype(entry.key, entry.tensor.dtype)
        dtypes = ["F32", "BF16", "F16"] if entry.tensor.is_floating_point() else []
        own = files.dtype_name(entry.tensor.dtype)
        dtypes += [own] if own not in dtypes else []
        suffixes = "weight_packed", "weight_scale", "weight_scale_inv"
        low_bit = {f"{entry.module}.{suffix}" for suffix in suffixes}
        if low_bit & set(reader.names):
            raise ValueError(
                f"{entry.key} is plain, and {entry.name} is quantized in the files; quantize the model "
                "by qshard.quantize_ first"
            )
        _check(reader, entry.name, entry.key, [entry.shape], dtypes)
        self.box = boxes.held[ranks.rank]

    def check_numbers(self):
        pass

    def __call__(self):
        local = self.entry.local
        if local.numel():
            local.copy_(self.reader.box(self.entry.name, self.box))


class _QuantizedLoad:
    def __init__(self, entry, boxes, reader, layout, ranks):
        self.entry, self.reader = entry, reader
        self.format = entry.format
        layout, scale_fmt = layout
        scheme = layouts.scheme_for(layout, self.format, scale_fmt)
        scheme.check(entry.key, *entry.shape)
        self.scheme = scheme
        if entry.part and entry.part.is_transposed and entry.tensor.shape[-1] % scheme.codes_per_byte:
            raise ValueError(
                f"{entry.part.key} has {entry.tensor.shape[-1]} columns, and two codes lie in a byte of its rows: files load into "
                "a stack of an even number of columns"
            )
        specs = scheme.tensors(*entry.shape)
        self.names = [f"{entry.module}.{suffix}" for suffix in specs]
        for name, (dtype, shape) in zip(self.names, specs.values()):
            shapes = [shape, (), (1,)] if torch.Size(shape).numel() == 1 else [shape]
            dtypes = [files.dtype_name(dtype)]
            if name == f"{entry.module}.{scheme.scale}" and scheme.scale_dtype is torch.float8_e8m0fnu:
                dtypes += ["F8_E8M0"]
            dtypes += ["U8", "F32"] if dtype is torch.float8_e8m0fnu else []  # DeepSeek-V3.1 has fp32
            _check(reader, name, entry.key, shapes, dtypes)
        self.box, self.matrix = boxes.held[ranks.rank], boxes.matrices[ranks.rank]
        if entry.part:  # the scales of an expert that another rank has may be this rank's, too
            _, rows, columns = entry.box[1]
            of_rows, _ = entry.part.box(((entry.part.expert, 1), rows, columns))
            self.matrix = of_rows, rows if entry.part.is_transposed else columns
            if not self.box[0][1]:
                self.box = (of_rows[0], 0), self.matrix[1]
        self.is_aligned = boxes.is_aligned
        if entry.part and not self.is_aligned:
            raise NotImplementedError(
                f"{entry.key} is cut inside a scale block of the files, where gate and up lie in one matrix or tensor "
                "parallelism cuts experts, and the model has blocks of its own; load it into a model whose experts' hidden "
                "size, divided by the ranks of tensor parallelism, is a multiple of the blocks' rows"
            )
        columnwise = info_of(self.format).columnwise
        block = columnwise.block_rows if columnwise else 1, 1
        if not self.is_aligned:
            # Blocks are those of the whole matrix, from which values are taken.
            self.matrix = tuple((0, size) for size in entry.shape)
            block = tuple(map(max, block, layouts.block_of(self.format)))
        # Whole blocks are read, where a window of them is no tensor.
        self.read = tuple(_blocks_around(*pair) for pair in zip(self.box, self.matrix, block))

    def check_numbers(self):
        """Scales alone: few bytes, and all that can still be refused. The codes of zeros."""
        if self.entry.part and not self.matrix[0][1]:
            return  # gate where tensor parallelism gave the rank rows of up, or the reverse
        try:
            self._tensor(codes=None)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.entry.key}: {error}") from error

    def __call__(self):
        local = self.entry.local
        read = self._tensor(self.codes())
        window = tuple(
            slice(first - start, first - start + count)
            for (first, count), (start, _) in zip(self.box, self.read)
        )
        if not self.is_aligned:  # the flush of all ranks quantizes them
            local.copy_(ops.dequantize(read, dtype=torch.float32)[window])
            return
        copy_values(local, read.narrow(0, window[0].start, self.box[0][1]))

    def codes(self):
        return self.reader.box(self.names[0], in_blocks(self.read, self._per_code))

    @property
    def _per_code(self):
        return 1, self.scheme.codes_per_byte

    def _tensor(self, codes):
        local, rows = self.entry.matrix, self.matrix[0]
        if codes is None:
            code_dtype, _ = self.scheme.tensors(*self.entry.shape)[self.scheme.codes]
            sizes = [count for _, count in in_blocks(self.read, self._per_code)]
            codes = torch.zeros(sizes, dtype=torch.uint8).view(code_dtype)
        scale, tensor_scale = self.scales()
        return ops.from_planes(
            codes.to(local.device),
            scale.to(local.device),
            self.format,
            tensor_scale_inv=None if tensor_scale is None else tensor_scale.to(local.device),
            dtype=local.dtype,
            keep_master=self.is_aligned and TensorState(local).keeps_master(),
            logical_rows=rows[1],
            row_offset=self.read[0][0] - rows[0],
        )

    def scales(self):
        """(scale_inv, tensor_scale_inv or None), on the CPU."""
        scheme = self.scheme
        # from_planes takes a grid of fp32 scales of all rows of the matrix.
        rows, columns = self.matrix[0], self.read[1]
        if scheme.block == (None, None):
            scale = self.reader.all(self.names[1]).reshape(1, 1)
        else:
            box = self.read if scheme.has_row_scales else (rows, columns)
            block = scheme.block_within(*self.entry.shape)
            scale = self.reader.box(self.names[1], in_blocks(box, block))
            if scheme.scale_dtype is torch.float8_e8m0fnu:
                scale = scale.view(torch.float8_e8m0fnu)
            elif scheme.scale_dtype is torch.float32 and scale.dtype.itemsize == 1:
                scale = scale.view(torch.float8_e8m0fnu).float()
        return scale, self._tensor_scale() if scheme.tensor_scale else None

    def _tensor_scale(self):
        """A file's scale that divides was rounded; the index tells which one it was made of."""
        read = self.reader.all(self.names[2]).reshape(1, 1)
        if not self.scheme.divides:
            return read
        exact = self.reader.metadata.get("qshard.tensor_scale_inv", {}).get(self.entry.name)
        if exact is None:
            return read.reciprocal()
        scale = torch.tensor([[float.fromhex(exact)]])
        if not torch.equal(scale.reciprocal(), read):
            raise ValueError(f"{files.INDEX} and {self.names[2]} tell of different scales")
        return scale


class _StackLoad:
    """The experts of a stack that this rank has, put together from the matrices of the files: a write of each by itself would
    count as one of the stack, whose codes a flush would make anew."""

    def __init__(self, parts):
        entry = parts[0].entry
        self.stack, self.format, self.key = local_of(entry.tensor), entry.format, entry.part.key
        (self.first, self.count), logical = (box[0] for box in entry.box)
        # The logical tensor was settled when the stack was quantized, be it before an expert mesh handed it out or after.
        logical_rows, *_ = TensorState(self.stack).logical_tensor()
        wholes = (0, entry.tensor.shape[0]), logical, (self.first, self.count)
        (self.first_row, self.rows), (start, self.rows_of_all) = (box[1] for box in entry.box)
        self.first_row -= start
        of_all = logical_rows // max(self.rows_of_all, 1)
        self.begin, self.of_all = next((whole for whole in wholes if whole[1] == of_all), wholes[-1])
        self.cuts_matrices = 0 < self.rows < self.rows_of_all
        self.is_share = self.count < self.of_all or self.cuts_matrices
        self.experts = {}  # in the order of the logical tensor
        for load in sorted(parts, key=lambda load: (load.entry.part.expert, load.entry.part.first)):
            if self.begin <= load.entry.part.expert < self.begin + self.of_all:
                self.experts.setdefault(load.entry.part.expert, []).append(load)

    def check_numbers(self):
        for loads in self.experts.values():
            for load in loads:
                load.check_numbers()
            self._scales(loads)

    def __call__(self):
        stack = self.stack
        held = range(self.first, self.first + self.count)
        codes = [self._codes(self.experts[expert]) for expert in held]
        codes = torch.stack(codes) if codes else ops.codes(stack)  # a rank may hold no expert
        planes, share = [], {}
        if self.is_share:
            share["logical_rows"] = self.of_all * self.rows_of_all
            share["row_offset"] = (self.first - self.begin) * self.rows_of_all + self.first_row
            share["rows_of_each"] = self.rows if self.cuts_matrices else 0
        info = info_of(self.format)
        accessors = [(ops.scale_inv, info.scale.place == "grid")]
        accessors += [(ops.tensor_scale_inv, True)] if info.outer_scale is not None else []
        for i, (accessor, spans_rows) in enumerate(accessors):
            # Scales of rows are this rank's; those that span rows are of all the ranks' experts.
            chosen = self.experts if spans_rows else held
            found = [self._scales(self.experts[expert])[i] for expert in chosen]
            put_together = torch.cat if spans_rows and self.is_share else torch.stack
            planes.append((put_together(found) if found else accessor(stack)).to(stack.device))
        scale, tensor_scale = planes if len(planes) == 2 else (*planes, None)
        read = ops.from_planes(
            codes.to(stack.device),
            scale,
            self.format,
            tensor_scale_inv=tensor_scale,
            dtype=stack.dtype,
            keep_master=TensorState(stack).keeps_master(),
            **share,
        )
        copy_values(stack, read)

    def _scales(self, loads):
        """Those of one expert's matrix."""
        scales, tensor_scales = zip(*(load.scales() for load in loads))
        one_for_all = [scales] if loads[0].scheme.block == (None, None) else []
        one_for_all += [tensor_scales] if loads[0].scheme.tensor_scale else []
        for values in one_for_all:
            if any(not torch.equal(value, values[0]) for value in values):
                raise ValueError(
                    f"{self.key}: expert {loads[0].entry.part.expert} has gate and up of other tensor scales in the files, and "
                    "one in this model; use a recipe whose blocks are smaller"
                )
        scale = scales[0] if loads[0].scheme.block == (None, None) else torch.cat(scales)
        if loads[0].entry.part.is_transposed:
            scale = experts.transposed_scales(scale, self.format, loads[0].entry.part.columns)
        return scale, tensor_scales[0]

    def _codes(self, loads):
        """Those of one expert's matrix."""
        codes = torch.cat([load.codes() for load in loads])
        if loads[0].entry.part.is_transposed:
            codes = experts.transposed_codes(codes, self.format, loads[0].entry.part.columns)
        return codes
