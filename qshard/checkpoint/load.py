"""load_quantized."""

from pathlib import Path

import torch
from torch import nn

from qshard.checkpoint import files, layouts
from qshard.checkpoint.model import entries_of
from qshard.checkpoint.ranks import Ranks, Rows

ops = torch.ops.qshard
_FUNCTION = "qshard.checkpoint.load_quantized"


def load_quantized(model: nn.Module, directory, *, names=None) -> None:
    """Reads a checkpoint of codes and scales, of `save_quantized` or from elsewhere, into a model, in
    place. Codes and scales come in as they are; masters become what they stand for.

    model: with values (not on meta), quantized by the recipe of the files' blocks:
        Float8BlockScaling(use_f32_scales=True) for scales that are not powers of two. Plain, or after
        `fully_shard` on any number of ranks: then a collective of all ranks, each of which reads the
        rows that it holds.
    directory: config.json, whose quantization_config names the layout, and safetensors files with an
        index or without.
    names: as for `save_quantized`.

    Every parameter and persistent buffer must be there with its shape, and nothing else. What is wrong
    is raised by name, on all ranks, before the model is changed.
    """
    tensors = [t for t in model.state_dict(keep_vars=True).values() if isinstance(t, torch.Tensor)]
    ranks = Ranks(tensors, _FUNCTION)
    loads, error = [], None
    try:
        loads = _checked_loads(model, Path(directory), names, ranks)
    except Exception as met:
        error = met
    ranks.agree(error)
    with torch.no_grad():
        for load in loads:
            load()


def _checked_loads(model, directory, names, ranks):
    """Functions that load one tensor each, and have no reason left to fail."""
    config = files.read_json(directory / "config.json")
    if "quantization_config" not in config:
        raise ValueError("config.json has no quantization_config; load_state_dict loads plain files")
    layout = layouts.layout_of(config["quantization_config"])
    reader = files.Reader(directory)
    loads, used = [], set()
    for entry in entries_of(model, names):
        if entry.tensor.is_meta:
            raise ValueError(f"{entry.key} is on the meta device; call model.to_empty(device=...) first")
        rows = Rows(entry.key, entry.tensor, ranks)
        if entry.is_quantized:
            load = _QuantizedLoad(entry, rows, reader, layout, ranks)
        else:
            load = _PlainLoad(entry, rows, reader, ranks)
        used.update(load.names)
        loads.append(load)
    unused = sorted(set(reader.names) - used)
    if unused:
        raise ValueError(f"the files hold {_some(unused)}, which this model has no place for")
    for load in loads:
        load.check_numbers()
    return loads


def _some(names):
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def _check(reader, name, key, shapes, dtypes):
    if name not in reader.names:
        raise ValueError(f"the files have no {name}, for {key}")
    shape, dtype = reader.shape_and_dtype(name)
    if shape not in shapes or dtype not in dtypes:
        raise ValueError(
            f"{name} is {dtype} {list(shape)} in the files; {key} needs {' or '.join(dtypes)} "
            f"{list(shapes[0])}"
        )


class _PlainLoad:
    def __init__(self, entry, rows, reader, ranks):
        self.entry, self.reader, self.names = entry, reader, [entry.name]
        dtype = files.dtype_name(entry.tensor.dtype)
        dtypes = ("F32", "BF16", "F16") if entry.tensor.is_floating_point() else (dtype,)
        suffixes = "weight_packed", "weight_scale", "weight_scale_inv"
        low_bit = {f"{entry.module}.{suffix}" for suffix in suffixes}
        if low_bit & set(reader.names):
            raise ValueError(
                f"{entry.key} is plain, and {entry.name} is quantized in the files; quantize the model "
                "by qshard.quantize_ first"
            )
        _check(reader, entry.name, entry.key, [tuple(entry.tensor.shape)], dtypes)
        self.window = None if rows.shard_dim is None else rows.window(ranks.rank)

    def check_numbers(self):
        pass

    def __call__(self):
        local = self.entry.local
        if self.window is None:
            local.copy_(self.reader.all(self.entry.name))
        elif self.window[1]:
            local.copy_(self.reader.rows(self.entry.name, *self.window))


class _QuantizedLoad:
    def __init__(self, entry, rows, reader, layout, ranks):
        self.entry, self.reader = entry, reader
        self.format = ops.format(entry.local)
        scheme = layouts.scheme_for(layout, layouts.family_of(self.format))
        scheme.check(entry.key, *entry.tensor.shape)
        self.scheme = scheme
        specs = scheme.tensors(*entry.tensor.shape)
        self.names = [f"{entry.module}.{suffix}" for suffix in specs]
        for name, (dtype, shape) in zip(self.names, specs.values()):
            shapes = [shape, (), (1,)] if torch.Size(shape).numel() == 1 else [shape]
            dtypes = [files.dtype_name(dtype)]
            dtypes += ["F8_E8M0"] if dtype is torch.uint8 and scheme.family == "mxfp8" else []
            _check(reader, name, entry.key, shapes, dtypes)
        self.rows, self.window = entry.tensor.shape[0], rows.window(ranks.rank)
        first, count = self.window
        # mxfp8_1x32 is made of whole blocks of rows, of which the window is taken.
        block = 32 if self.format.startswith("mxfp8_1x32") else 1
        self.first = first // block * block
        self.count = min(-(-(first + count) // block) * block, self.rows) - self.first if count else 0

    def check_numbers(self):
        """Scales alone: few bytes, and all that can still be refused. The codes of zeros."""
        try:
            self._tensor(codes=None)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.entry.key}: {error}") from error

    def __call__(self):
        local = self.entry.local
        state = {name: tensor.clone() for name, tensor in ops._state(local).items()}
        first = self.window[0] - self.first
        read = self._tensor(self.reader.rows(self.names[0], self.first, self.count))
        local.copy_(read.narrow(0, first, self.window[1]))
        # What the format remembers of training is the model's.
        for name, tensor in ops._state(local).items():
            tensor.copy_(state[name])

    def _tensor(self, codes):
        local, scheme = self.entry.local, self.scheme
        columns = self.entry.tensor.shape[1]
        code_dtype, code_shape = scheme.tensors(self.rows, columns)[scheme.codes]
        if codes is None:
            codes = torch.zeros(self.count, code_shape[1], dtype=torch.uint8).view(code_dtype)
        tensor_scale = None
        if scheme.family in ("tensor", "block"):
            scale = self.reader.all(self.names[1])
            scale = scale.reshape(1, 1) if scheme.family == "tensor" else scale
        else:
            scale = self.reader.rows(self.names[1], self.first, self.count)
            if scheme.family == "mxfp8":
                scale = scale.view(torch.float8_e8m0fnu)
        if scheme.tensor_scale:
            tensor_scale = self._tensor_scale().to(local.device)
        return ops.from_planes(
            codes.to(local.device),
            scale.to(local.device),
            self.format,
            tensor_scale_inv=tensor_scale,
            dtype=local.dtype,
            keep_master=ops._keeps_master(local),
            logical_rows=self.rows,
            row_offset=self.first,
        )

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
