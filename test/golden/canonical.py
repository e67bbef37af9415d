"""What is digested: bytes of tensors, and forms of files that do not depend on paths, times,
processes, devices, or which of two equal strings Python's pickler has met before."""

import hashlib
import io
import pickle
import pickletools
import zipfile

import torch

LENGTH = 8  # characters of a digest


def digest(*parts):
    """The digest of bytes, tensors, and objects whose repr says all."""
    sha = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else described(part)
        sha.update(len(data).to_bytes(8, "little") + data)
    return sha.hexdigest()[:LENGTH]


def described(part):
    if isinstance(part, torch.Tensor):
        geometry = f"{str(part.dtype).removeprefix('torch.')} {tuple(part.shape)} "
        return geometry.encode() + bytes_of(part)
    if isinstance(part, (list, tuple)):
        return b"[" + b",".join(map(described, part)) + b"]"
    if isinstance(part, dict):
        return described([(key, part[key]) for key in sorted(part)])
    return repr(part).encode()


def bytes_of(tensor):
    """The bytes of a plain tensor's values, in order."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes()


def without_nan_bits(tensor):
    """All NaNs as one: which NaN a sum or product is differs between processors."""
    return torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)


# ----------------------------------------------------------------------------------------- pickles


def pickle_stream(data):
    """The operations of a pickle. Where the pickler refers to a string that it wrote before, this
    has the string: two equal strings are one object in one version of Python, two in another."""
    strings, others, result, last = {}, {}, [], None
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in ("PROTO", "FRAME", "STOP"):
            continue
        if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            key = len(strings) + len(others) if argument is None else argument
            if last is not None and last[0] == "str":
                strings[key] = last
            else:
                others[key] = len(others)
            continue
        if name in ("GET", "BINGET", "LONG_BINGET"):
            last = strings[argument] if argument in strings else ("again", others[argument])
        elif "UNICODE" in name:
            last = ("str", "cpu" if argument == "cuda:0" else argument)
        elif name in ("BININT", "BININT1", "BININT2", "LONG1"):
            last = ("int", argument)
        else:
            last = (name, argument)
        result.append(last)
    return result


def saved_file(tensor_or_module):
    """(the stream of data.pkl, the bytes of the storages) of what torch.save writes."""
    file = io.BytesIO()
    torch.save(tensor_or_module, file)
    with zipfile.ZipFile(file) as archive:
        members = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    names = sorted((name for name in members if name.startswith("data/")), key=number_of)
    return pickle_stream(members["data.pkl"]), [members[name] for name in names]


def number_of(name):
    return int(name.partition("/")[2])


# ------------------------------------------------------------------------------------- checkpoints


def checkpoint(folder):
    """[(key, what DCP's metadata says of it, the tensor's bytes)] of a checkpoint in a folder."""
    with open(folder / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    items = []
    for index, place in metadata.storage_data.items():
        with open(folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            written = torch.load(io.BytesIO(file.read(place.length)), weights_only=False)
        kept = metadata.state_dict_metadata[index.fqn]
        about = type(kept).__name__
        if properties := getattr(kept, "properties", None):
            chunks = sorted((tuple(c.offsets), tuple(c.sizes)) for c in kept.chunks)
            kind = str(properties.dtype), properties.requires_grad
            about = (about, *kind, tuple(kept.size), chunks)
        offset = None if index.offset is None else tuple(index.offset)
        items.append((index.fqn, offset, about, written))
    return sorted(items, key=lambda item: (item[0], item[1] or ()))
