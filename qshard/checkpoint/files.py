"""safetensors files: written tensor by tensor, which the package cannot, and read with it.

Format: https://github.com/huggingface/safetensors, 8 bytes of header length, a JSON header, and the
tensors' bytes in its order.
"""

import json
import os
from pathlib import Path

import torch

INDEX = "model.safetensors.index.json"
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PARTIAL = ".partial"  # of files that are being written


def nbytes(dtype, shape):
    return torch.Size(shape).numel() * dtype.itemsize


def check_dtype(name, dtype):
    if dtype not in _NAMES:
        raise TypeError(f"{name} is {dtype}, which safetensors files do not hold")


class FileWriter:
    """One file, whose tensors come in any order."""

    def __init__(self, directory, name, tensors):
        """tensors: {name: (dtype, shape)}."""
        self.path = Path(directory) / name
        header, offset = {"__metadata__": {"format": "pt"}}, 0
        for key, (dtype, shape) in tensors.items():
            end = offset + nbytes(dtype, shape)
            header[key] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.offsets = {
            key: 8 + len(text) + header[key]["data_offsets"][0] for key in tensors
        }
        self.file = open(f"{self.path}{_PARTIAL}", "wb")
        self.file.write(len(text).to_bytes(8, "little") + text)
        self.file.truncate(8 + len(text) + offset)

    def write(self, key, tensor):
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self.file.seek(self.offsets[key])
        self.file.write(memoryview(flat.numpy()))

    def close(self):
        self.file.close()

    def finish(self):
        os.replace(f"{self.path}{_PARTIAL}", self.path)

    def discard(self):
        self.file.close()
        for path in (f"{self.path}{_PARTIAL}", self.path):
            Path(path).unlink(missing_ok=True)


def write_json(path, content):
    partial = Path(f"{path}{_PARTIAL}")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(partial, path)


def read_json(path):
    """Raises FileNotFoundError or ValueError naming the file."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path.name} in {path.parent}")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} does not hold a JSON object")
    return content


class Reader:
    """The tensors of a directory, by name; nothing of them is read until asked for."""

    def __init__(self, directory):
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise ModuleNotFoundError(
                "qshard.checkpoint reads files with the safetensors package: pip install safetensors"
            ) from error
        directory = Path(directory)
        self.files, self.names, self.metadata = {}, {}, {}
        if (directory / INDEX).is_file():
            index = read_json(directory / INDEX)
            weight_map = index.get("weight_map")
            if not isinstance(weight_map, dict) or not all(
                isinstance(file, str) and Path(file).name == file for file in weight_map.values()
            ):
                raise ValueError(f"{INDEX} has no weight_map of names to files beside it")
            self.metadata = index.get("metadata")
            if not isinstance(self.metadata, dict):
                self.metadata = {}
            files = sorted(set(weight_map.values()))
        else:
            weight_map, files = None, sorted(p.name for p in directory.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"there are no safetensors files in {directory}")
        for file in files:
            if not (directory / file).is_file():
                raise FileNotFoundError(f"{INDEX} names {file}, which is not there")
            try:
                self.files[file] = safe_open(directory / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file} cannot be read: {error}") from error
            for key in self.files[file].keys():
                self.names[key] = file
        for key, file in (weight_map or {}).items():
            if self.names.get(key) != file:
                raise ValueError(f"{INDEX} says that {key} is in {file}, which does not hold it")

    def shape_and_dtype(self, name):
        piece = self.files[self.names[name]].get_slice(name)
        return tuple(piece.get_shape()), piece.get_dtype()

    def box(self, name, box):
        """[first, first + count) of each dimension; no more than that is read."""
        piece = self.files[self.names[name]].get_slice(name)
        shape = piece.get_shape()
        if tuple(box) == tuple((0, size) for size in shape):
            return self.all(name)
        if any(count == 0 for _, count in box):  # safetensors has no empty windows of empty tensors
            none = piece[0:0] if shape[0] else self.all(name)
            return none.new_empty([count for _, count in box])
        return piece[tuple(slice(first, first + count) for first, count in box)]

    def all(self, name):
        return self.files[self.names[name]].get_tensor(name)


def dtype_name(dtype):
    return _NAMES[dtype]
