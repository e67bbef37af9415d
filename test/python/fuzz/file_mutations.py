"""What fuzz_files.py does to files: other values in pickles and DCP metadata, damaged bytes."""

import io
import pickle
import pickletools
import re
import struct
import zipfile

import torch

from qshard._runtime.classes import SavedTensor

NUMBERS = (
    *(0, 1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 64, 127, 128, 129, 1023, 1024, 4096, -1, -2, -128),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40 - 1, 2**40, 2**60, 2**61, 2**62, 2**63 - 1, 2**63),
    *(2**64 - 1, 2**64, 2**100, -(2**31), -(2**32), -(2**62), -(2**63), -(2**63) - 1),
)
TEXTS = (
    *("", "f9", "nvfp4", "mxfp8", "mxfp8_1x32", "float8_blockwise", "float8_delayed"),
    *("mxfp8[phase]", "nvfp4[stochastic]", "float8_delayed[history=1000000000000]", "nvfp4["),
    *("float8_delayed[history=1048576]", "float8_delayed[history=3]", "float8_delayed[margin=64]"),
    *("x" * 100000, "\udc80", "\0"),
    *("cpu", "meta", "cuda:0", "cuda:99", "storage", "0", "1", "2", "9"),
)
GLOBALS = (
    *("torch float32", "torch float16", "torch bfloat16", "torch float64", "torch uint8"),
    *("torch int8", "torch int32", "torch FloatStorage", "torch ByteStorage", "torch Tensor"),
    *("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "torch Size"),
    *("torch._utils _rebuild_meta_tensor_no_storage", "torch._utils _rebuild_sparse_tensor"),
    *("qshard.serialization rebuild_tensor", "_qshard_checkpoint rebuild_tensor", "os system"),
    *("collections OrderedDict", "torch.nn.parameter Parameter"),
)


# ---------------------------------------------------------------------------- mutations of a pickle


def push(value):
    """Opcodes that put a value on the stack."""
    if value is None:
        return b"N"
    if value is True or value is False:
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        encoded = pickle.encode_long(value)
        return b"\x8a" + bytes([len(encoded)]) + encoded
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        encoded = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(encoded)) + encoded
    if isinstance(value, list):
        return b"](" + b"".join(map(push, value)) + b"e"
    raise TypeError(type(value))


def near(rng, number):
    """A number that may take its place."""
    if rng.random() < 0.5:
        return rng.choice(NUMBERS)
    return rng.choice((number + 1, number - 1, 2 * number, -number, number + 16, number // 2))


INTEGERS = ("BININT", "BININT1", "BININT2", "LONG1")
VALUES = INTEGERS + ("BINUNICODE", "NEWTRUE", "NEWFALSE", "NONE", "EMPTY_LIST", "BINGET", "GLOBAL")


def another_value(rng, name, value, memo):
    """Opcodes in place of the one called `name`."""
    if rng.random() < 0.1:  # of another type
        wrong = rng.choice((None, True, 1.5, "x", [], [1, 2, 3], 7, *memo[:1]))
        return b"h" + bytes([rng.choice(memo)]) if memo and rng.random() < 0.5 else push(wrong)
    if name in INTEGERS:
        return b"" if rng.random() < 0.05 else push(near(rng, value))
    if name == "BINUNICODE":
        return push(rng.choice(TEXTS))
    if name in ("NEWTRUE", "NEWFALSE"):
        return push(name == "NEWFALSE")
    if name == "GLOBAL":
        return b"c" + rng.choice(GLOBALS).replace(" ", "\n").encode() + b"\n"
    if name == "BINGET" and memo:
        return b"h" + bytes([rng.choice(memo)])
    return push(rng.choice((None, [], [1], [0] * 70)))


def mutate_values(rng, data):
    """The pickle with a few of its values exchanged."""
    operations = [(op.name, arg, at) for op, arg, at in pickletools.genops(data)]
    ends = [at for _, _, at in operations[1:]] + [len(data)]
    memo = [arg for name, arg, _ in operations if name == "BINPUT"]
    targets = [i for i, (name, _, _) in enumerate(operations) if name in VALUES]
    chosen = set(rng.sample(targets, min(len(targets), rng.choice((1, 1, 1, 2, 3)))))
    pieces = []
    for i, (name, arg, at) in enumerate(operations):
        piece = data[at : ends[i]]
        pieces.append(another_value(rng, name, arg, memo) if i in chosen else piece)
    return b"".join(pieces)


def flip(rng, data, first=0):
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if len(data) > first:
            data[rng.randrange(first, len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def damage(rng, data):
    return rng.choice(
        (
            lambda: flip(rng, data),
            lambda: data[: rng.randrange(len(data) + 1)],
            lambda: data + bytes(rng.randrange(1, 64)),
            lambda: b"",
        )
    )()


def mutate_archive(rng, file):
    """A torch.save file with other values in its pickle, or other records."""
    if rng.random() < 0.2:
        return damage(rng, file)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(file)) as archive, zipfile.ZipFile(out, "w") as result:
        names = archive.namelist()
        target = rng.choice([n for n in names if "/data" in n])
        if rng.random() < 0.8:
            target = next(n for n in names if n.endswith("/data.pkl"))
        for name in names:
            data = archive.read(name)
            if name == target and name.endswith("data.pkl"):
                data = mutate_values(rng, data)
            elif name == target:
                data = damage(rng, data)
            result.writestr(name, data)
    return out.getvalue()


# ------------------------------------------------------------------------------------ the corpus


class Pickled:
    """Pickles as a call of `rebuild` with `args`, and with a state if there is one."""

    def __init__(self, rebuild, args, *state):
        self.parts = (rebuild, tuple(args), *state)

    def __reduce__(self):
        return self.parts


def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def tensors():
    """One of each kind, small: a mutation in a thousand zeros hits nothing."""
    ops = torch.ops.qshard
    torch.manual_seed(0)
    formats = [*ops.formats(), "nvfp4[stochastic]", "float8_delayed[history=4,margin=1]"]
    for format in formats:
        rows = 32 if format == "mxfp8_1x32" else 5
        values = torch.randn(rows, 20)
        q = ops.quantize(values, format)
        yield q
        yield q[1:3] if rows == 5 else q[:, 3:9]
        if "stochastic" not in format:
            yield torch.nn.Parameter(ops.quantize(values, format, keep_master=True))
        shard = ops.quantize(values, format, logical_rows=2 * rows, row_offset=rows)
        yield shard.mul_(1.1)
    yield ops.quantize(torch.randn(3, 4, 20), "float8_tensorwise", keep_master=True).bfloat16()
    yield ops.quantize(torch.zeros(0, 16), "nvfp4")
    whole = ops.quantize(torch.randn(5, 20), "mxfp8")
    padded = whole.new_zeros(2, 20)
    padded[:1].copy_(whole[4:])
    yield padded


def described(rng, whole):
    """A pickle of other numbers than `whole`'s, often with as many bytes as they ask for."""
    ops = torch.ops.qshard
    rebuild, args = whole.detach().__reduce_ex__(2)
    data, pending, layout, format, size, stride, offset, dtype, state, grad = args

    odd = rng.choice((0.0, 0.02, 0.1))

    def number(ordinary):
        return rng.choice(NUMBERS if rng.random() < odd else ordinary)

    if rng.random() < 0.6:
        format = rng.choice(list(ops.formats()))
    if rng.random() < odd:
        format = rng.choice(TEXTS)
    ordinary_rows = (32, 64) if format.startswith("mxfp8_1x32") else (0, 1, 2, 5, 31, 32, 33, 64)
    rows, cols = number(ordinary_rows), number((0, 1, 8, 16, 20, 33, 128, 130))
    if rng.random() < 0.05:  # in bytes 0 by arithmetic that forgets what overflows
        power = rng.randrange(26, 38)
        rows, cols = 2**power, 2 ** (64 - power)
    matrix = number((rows, rows, 32, 64))
    logical = number((matrix, matrix, 2 * matrix, 3 * matrix))
    keeps_master, dirty = number((0, 0, 1)), number((0, 0, 1))
    layout = [rows, cols, logical, matrix]
    layout += [number((0, 0, -1, min(logical, 5), logical)), keeps_master, dirty]
    layout += [number((0, 0, 0, 1, 2) if ordinary_rows[0] == 32 else (0,))][: rng.random() < 0.9]
    if rng.random() < 0.3:
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        dtype = rng.choice((*dtypes, torch.int8) if rng.random() < odd else dtypes)
    views = [([rows, cols], [cols, 1])] * 3 + [([rows * cols], [1])]
    views += [([1, rows, cols], [0, cols, 1])]
    views += [([cols, rows], [1, cols]), ([rows, max(cols - 3, 0)], [cols, 1]), ([7, cols], [0, 1])]
    size, stride = ([number((n,)) for n in side] for side in rng.choice(views))
    if rng.random() < 0.05:  # ends where it begins by the same arithmetic
        power = rng.randrange(2, 40)
        size[0], stride[0] = 2**power + 1, 2 ** (64 - power)
    offset = number((0, 0, 0, 0, 1, cols))
    if dirty == 1 and keeps_master == 0 and 0 <= rows < 100 and 0 <= cols < 200:
        pending = torch.randn(rows, cols).to(dtype)
    elif rng.random() < 0.9:
        pending = None
    state = described_state(rng, format, matrix, logical)
    fits = rng.random() < 0.95
    for _ in range(2):
        try:
            SavedTensor(data, pending, layout, format, size, stride, offset, dtype, state).read()
        except Exception as error:
            needs = re.search(r"takes? (\d+) bytes", str(error))
            if needs and fits and int(needs[1]) < 1 << 22:
                data = torch.frombuffer(
                    bytearray(rng.randbytes(int(needs[1])) or b"\0"), dtype=torch.uint8
                )[: int(needs[1])]
    args = (data, pending, layout, format, size, stride, offset, dtype, state, grad)
    build = ()
    if rng.random() < 0.1:  # torch's unpickler then calls set_ with it
        dtype = dtype if dtype.is_floating_point else torch.float32
        other = torch.zeros(rng.choice((data.numel(), 64)) // dtype.itemsize, dtype=dtype)
        build = ((other._typed_storage(), offset, tuple(size), tuple(stride)),)
    return saved(Pickled(rebuild, args, *build))


def described_state(rng, format, matrix, logical):
    """The state of a format, mostly of the right shape."""
    state = []
    if format.startswith("float8_delayed"):
        matrices = logical // matrix if matrix > 0 and 0 <= logical < 1000 * matrix else 1
        history = re.search(r"history=(\d+)", format)
        length = int(history[1]) if history else 1024
        length = length if length <= 1 << 16 else 8
        shapes = [(matrices + 2, length), (matrices + 2, 3)]
        for shape in shapes:
            expanded = rng.random() < 0.1
            state.append(torch.rand(1, 1).expand(shape) if expanded else torch.rand(shape))
    if "stochastic" in format:
        state.append(torch.randint(-(2**28), 2**31 - 1, (3,), dtype=torch.int32))
    return state[: rng.choice((9, 9, 9, 9, 9, 9, 9, 1))]


# ------------------------------------------------------------------------------------ DCP metadata


def mutate_metadata(rng, metadata):
    """Other numbers in a few places of a DCP Metadata object."""

    def numbers(sequence):
        out = list(sequence)
        if out and rng.random() < 0.9:
            i = rng.randrange(len(out))
            out[i] = near(rng, out[i])
        else:
            out.append(rng.choice(NUMBERS))
        return out

    def size(sequence):
        fit = [n if -(2**63) <= n < 2**63 else 2**63 - 1 for n in numbers(sequence)]
        return torch.Size(fit)

    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(list(metadata.state_dict_metadata))
        entry = metadata.state_dict_metadata[name]
        index, info = rng.choice(list(metadata.storage_data.items()))
        where = rng.randrange(7)
        if where == 0:
            entry.size = size(entry.size)
        elif where in (1, 2) and entry.chunks:
            at = rng.randrange(len(entry.chunks))
            chunk = entry.chunks[at]
            values = {"offsets": chunk.offsets, "sizes": chunk.sizes}
            field = "offsets" if where == 1 else "sizes"
            values[field] = size(values[field])
            entry.chunks[at] = type(chunk)(**values)
        elif where == 3:
            entry.chunks = entry.chunks * 2 if rng.random() < 0.5 else []
        elif where == 4:
            dtypes = (torch.int8, torch.float64, torch.bfloat16, torch.complex64)
            entry.properties.dtype = rng.choice(dtypes)
        else:
            field = "offset" if where == 5 else "length"
            info.__dict__[field] = near(rng, getattr(info, field))
            metadata.storage_data[index] = info
