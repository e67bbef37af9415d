"""Arguments for qshard's operators (fuzz_operators.py): those of an ordinary call, and others that
a stranger might give instead, drawn from the schema's types. All of it follows from the seed."""

import random

import torch
from fuzz_baselines import baseline
from torch._subclasses.fake_tensor import FakeTensorMode

from qshard._runtime.classes import TensorState
from qshard.formats import info_of

ops = torch.ops.qshard
FORMATS = tuple(ops.formats()) + (
    "float8_delayed[history=4]",
    "float8_tensorwise[stochastic]",
    "nvfp4[stochastic]",
    "mxfp8_1x32[phase]",
)
MESSAGES = ("float8", "mxfp8", "nvfp4")
PLANES = ("codes", "scale_inv", "tensor_scale_inv", "columnwise_codes", "row_image", "master")
TOP = 2**63 - 1
INTS = (0, 1, -1, 2, 3, 15, 16, 17, 31, 32, 127, 128, 4097, 2**31 - 1, 2**31, 2**32, 2**40, 2**62)
INTS += (TOP, TOP - 1, TOP - 15, TOP - 127, -TOP, -TOP - 1, -2, -16, -(2**31))
STRINGS = (
    "",
    "nope",
    "x" * 100000,
    "float8_blockwise[",
    "mxfp8]",
    "mxfp8\0",
    "ü" * 20,
    "nvfp4[stochastic",
)
STRINGS += (
    "float8_delayed[history=9223372036854775808]",
    "float8_delayed[margin=-1]",
    "%s%n{}",
    "\ud7ff",
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-300, 1e300, float("inf"), float("nan"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ODD_DTYPES = (
    torch.float64,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.complex64,
)
ODD_DTYPES += (torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32, torch.quint8)
DEVICES = (
    torch.device("cpu"),
    torch.device("meta"),
    torch.device("cuda:0"),
    torch.device("cuda:99"),
)


class Draw:
    """One call: an operator's arguments by name, and a word on each that says what it is."""

    def __init__(self, schema, seed, memory=None):
        self.rng = random.Random(f"arguments {seed}")
        self.schema, self.memory = schema, memory
        self.generator = torch.Generator().manual_seed(seed)
        self.notes, self.masters = {}, []
        choose = self.rng.choice
        self.format = choose(FORMATS)
        self.dtype = choose(DTYPES) if self.rng.random() < 0.4 else torch.float32
        self.tokens = choose((1, 2, 3, 16, 33))
        self.columns = choose((1, 2, 16, 20, 32, 33, 64, 128, 130))
        self.rows = self.fit(choose((1, 3, 16, 32, 64, 129)))
        self.is_guarded = self.rng.random() < 0.7
        self.fake_mode = None

    def fit(self, rows):
        return -(-rows // 32) * 32 if info_of(self.format).columnwise else rows

    # ------------------------------------------------------------------------------- tensors

    def plain(self, *shape, dtype=None):
        values = torch.randn(*shape, generator=self.generator).to(dtype or self.dtype)
        return self.place(values)

    def place(self, tensor):
        return self.memory.copy(tensor) if self.memory and self.is_guarded else tensor

    def bytes(self, *shape):
        return self.place(
            torch.randint(0, 256, shape, generator=self.generator, dtype=torch.uint8)
        )

    def quantized(self, rows=None, columns=None, format=None, keep_master=None):
        format = format or self.format
        rows = self.rows if rows is None else rows
        if info_of(format).columnwise:
            rows = -(-rows // 32) * 32
        columns = self.columns if columns is None else columns
        if keep_master is None:
            keep_master = self.rng.random() < 0.5
        values = torch.randn(rows, columns, generator=self.generator).to(self.dtype)
        return ops.quantize(values, format, keep_master=keep_master and "stochastic" not in format)

    def maybe(self, value):
        """An optional argument."""
        return value() if self.rng.random() < 0.5 else None

    def flag(self):
        return self.rng.random() < 0.5

    # ------------------------------------------------------------------------- the arguments

    def arguments(self):
        """(positional, keywords) of a call."""
        values = baseline(self)
        self.mutate(values)
        positional = [values[a.name] for a in self.schema.arguments if not a.kwarg_only]
        keywords = {a.name: values[a.name] for a in self.schema.arguments if a.kwarg_only}
        return positional, keywords

    def mutate(self, values):
        names = [a.name for a in self.schema.arguments]
        types = {a.name: str(a.type) for a in self.schema.arguments}
        written = [a.name for a in self.schema.arguments if a.alias_info and a.alias_info.is_write]
        chance = self.rng.random()
        if not names or chance < 0.12:
            return
        if chance < 0.17:  # all tensors without memory
            kind = self.rng.choice(("meta", "fake"))
            for name in names:
                values[name] = self.everywhere(values[name], kind)
            self.notes["all tensors"] = kind
            return
        count = 1 if chance < 0.65 else 2 if chance < 0.9 else len(names)
        chosen = self.rng.sample(names, min(count, len(names)))
        if written and chance < 0.5 and self.flag():
            chosen = written[:1]
        for name in chosen:
            if name in written and "List" not in types[name] and self.flag():
                values[name] = self.odd_tensor(values[name], name, self.rng.choice(ODD_TO_WRITE))
            else:
                values[name] = self.odd(types[name], values[name], name)

    def everywhere(self, value, kind):
        if isinstance(value, list):
            return [self.everywhere(v, kind) for v in value]
        return (
            self.odd_tensor(value, "all tensors", kind)
            if isinstance(value, torch.Tensor)
            else value
        )

    def odd(self, type_name, value, name):
        if type_name.startswith("Optional["):
            if self.rng.random() < 0.2:
                return self.noted(name, None, "None")
            type_name = type_name[len("Optional[") : -1]
        if type_name.startswith("List["):
            return self.odd_list(type_name[len("List[") : -1], value, name)
        draw = {
            "Tensor": lambda: self.odd_tensor(value, name),
            "int": lambda: self.noted(name, self.odd_int(value)),
            "SymInt": lambda: self.noted(name, self.odd_int(value)),
            "number": lambda: self.noted(name, self.odd_int(value)),
            "float": lambda: self.noted(name, self.rng.choice(FLOATS)),
            "bool": lambda: self.noted(name, not value),
            "str": lambda: self.noted(
                name, self.rng.choice(STRINGS + FORMATS + MESSAGES + PLANES)
            ),
            "Device": lambda: self.noted(name, self.rng.choice(DEVICES)),
            "ScalarType": lambda: self.noted(name, self.rng.choice(DTYPES + ODD_DTYPES)),
        }
        if name.endswith("dtype"):  # a ScalarType is an int to the schema's types
            return draw["ScalarType"]()
        return draw[type_name]()

    def noted(self, name, value, note=None):
        self.notes[name] = note or short(value)
        return value

    def odd_int(self, near):
        if isinstance(near, int) and self.rng.random() < 0.3:
            return near + self.rng.choice((-1, 1, 16, -16))
        return self.rng.choice(INTS)

    def odd_list(self, item_type, value, name):
        items = list(value or [])
        ways = ("empty", "longer", "shorter", "one odd", "one odd", "all odd", "twice")
        how = self.rng.choice(
            ways + ("an overflowing sum",) * (item_type == "int" and len(items) > 1)
        )
        if how == "empty":
            items = []
        elif how == "shorter":
            items = items[:-1]
        elif how == "an overflowing sum":
            items[:3] = self.rng.choice(([TOP, TOP, 2], [TOP, 1, 1], [2**62, 2**62, 2**62]))[
                : len(items)
            ]
        elif how == "twice":
            items = items + items
        elif how == "longer" or not items:
            like = items[-1] if items else (self.quantized() if item_type == "Tensor" else 1)
            items.append(self.odd(item_type, like, f"{name}[{len(items)}]"))
        else:
            places = range(len(items)) if how == "all odd" else [self.rng.randrange(len(items))]
            for i in places:
                items[i] = self.odd(item_type, items[i], f"{name}[{i}]")
        plain = not any(isinstance(item, torch.Tensor) for item in items)
        return self.noted(name, items, f"{how}: {short(items)}" if plain else how)

    # ---------------------------------------------------------------------------- odd tensors

    def odd_tensor(self, like, name, kind=None):
        if not isinstance(like, torch.Tensor):
            like = self.plain(self.tokens, self.columns)
        kind = kind or self.rng.choice(tuple(KINDS))
        try:
            result = KINDS[kind](self, like)
        except Exception as error:  # there is no such tensor of this shape or dtype
            kind, result = f"as it was, not {kind} ({type(error).__name__})", like
        self.notes[name] = kind
        return result

    def fake(self, tensor):
        self.fake_mode = self.fake_mode or FakeTensorMode(allow_non_fake_inputs=True)
        return self.fake_mode.from_tensor(tensor)


def short(value):
    text = repr(value)
    return text if len(text) < 120 else f"{text[:80]}... ({len(text)} characters)"


def value_of(t):
    """A plain copy."""
    t = t.detach()
    return (TensorState(t).export_view() if ops.is_quantized(t) else t).clone()


def freed(t):
    t = t.detach().clone()
    t.untyped_storage().resize_(0)
    return t


def quantized_like(draw, t, **options):
    matrix = value_of(t).float()
    if matrix.dim() < 2:
        matrix = matrix.reshape(1, -1)
    return ops.quantize(matrix.to(draw.dtype), draw.format, **options)


def written(draw, t):
    return quantized_like(draw, t).mul_(2)


def new_shard(whole):
    """The last rows and padding, as sharding by hand makes them."""
    shard = whole.new_zeros(whole[:2].shape)
    shard[:1].copy_(whole[-1:])
    return shard


def waiting_shard(draw, t):
    """A shard whose scales other ranks have to agree on."""
    matrix = value_of(t).float()
    matrix = matrix if matrix.dim() >= 2 else matrix.reshape(1, -1)
    return ops.quantize(matrix, draw.format, logical_rows=4 * matrix.shape[0], row_offset=0)


def gathered(draw, t):
    q = quantized_like(draw, t)
    return ops._post_all_gather(q, ops._pre_all_gather(q, "").clone(), torch.float32)


def freed_gathered(draw, t):
    q = quantized_like(draw, t)
    image = ops._pre_all_gather(q, "").clone()
    made = ops._post_all_gather(q, image, torch.float32)
    image.untyped_storage().resize_(0)
    return made


def every_second(draw, t):
    doubled = value_of(t).repeat_interleave(2, -1)
    return draw.place(doubled)[..., ::2]


def misaligned(draw, t):
    padded = torch.cat([t.detach().flatten()[:1], t.detach().flatten()])
    return draw.place(padded)[1:].view(t.shape)


def with_specials(draw, t):
    t = value_of(t)
    flat = t.view(-1)
    for i, special in enumerate((float("nan"), float("inf"), -float("inf"), -float("nan"))):
        flat[i :: 7 + i] = special
    return draw.place(t)


def inference(draw, t):
    with torch.inference_mode():
        return value_of(t) * 1


def negated(draw, t):
    if t.itemsize == 1 or not t.is_floating_point():
        raise TypeError("torch has no such view")
    return torch._neg_view(t)


def master_of(draw, t):
    q = quantized_like(draw, t, keep_master=True)
    draw.masters.append((q, ops.master(q)))
    return draw.masters[-1][1]


def overlapping(draw, t):
    return t.detach().contiguous().as_strided(t.shape, [1] * t.dim())


KINDS = {
    "a leaf that requires grad": lambda d, t: t.detach().clone().requires_grad_(),
    "requires grad, no leaf": lambda d, t: t.detach().clone().requires_grad_() * 1,
    "an inference tensor": inference,
    "transposed": lambda d, t: t.t().contiguous().t() if t.dim() == 2 else t.movedim(0, -1),
    "of every second column": every_second,
    "expanded": lambda d, t: t[:1].expand(t.shape),
    "overlapping": overlapping,
    "negated": negated,
    "negated imaginary part": lambda d, t: torch.complex(t.float(), t.float()).conj().imag,
    "conj": lambda d, t: torch.complex(t.float(), t.float()).conj(),
    "misaligned": misaligned,
    "with NaN and infinity": with_specials,
    "freed": lambda d, t: freed(t),
    "meta": lambda d, t: t.detach().to("meta"),
    "fake": lambda d, t: d.fake(t.detach()),
    "of another dtype": lambda d, t: value_of(t).to(d.rng.choice(ODD_DTYPES[:-1])),
    "bfloat16": lambda d, t: d.place(value_of(t).to(torch.bfloat16)),
    "float16": lambda d, t: d.place(value_of(t).to(torch.float16)),
    "quantized": lambda d, t: quantized_like(d, t),
    "quantized with a master": lambda d, t: quantized_like(d, t, keep_master=True),
    "the master of a quantized one": master_of,
    "quantized, written": written,
    "quantized, a shard that waits": waiting_shard,
    "quantized, on meta": lambda d, t: quantized_like(d, t).to("meta"),
    "quantized, a row of it": lambda d, t: quantized_like(d, t)[0],
    "quantized, transposed": lambda d, t: quantized_like(d, t).t(),
    "quantized, a new shard": lambda d, t: new_shard(quantized_like(d, t)),
    "memory for a shard": lambda d, t: torch.empty_like(quantized_like(d, t)).fill_(0.5),
    "quantized, freed": lambda d, t: freed(quantized_like(d, t)),
    "quantized, freed, with a master": lambda d, t: freed(quantized_like(d, t, keep_master=True)),
    "gathered": gathered,
    "gathered and freed": freed_gathered,
    "export view": lambda d, t: TensorState(quantized_like(d, t)).export_view(),
    "codes": lambda d, t: ops.codes(quantized_like(d, t)),
    "coo": lambda d, t: value_of(t).to_sparse(),
    "csr": lambda d, t: value_of(t).to_sparse_csr(),
    "mkldnn": lambda d, t: value_of(t).to_mkldnn(),
    "nested": lambda d, t: torch.nested.nested_tensor([value_of(t), value_of(t)]),
    "quint8": lambda d, t: torch.quantize_per_tensor(value_of(t).float(), 0.1, 0, torch.quint8),
    "of no dimension": lambda d, t: d.place(value_of(t).sum()),
    "of one dimension": lambda d, t: d.place(value_of(t).flatten()),
    "of one dimension more": lambda d, t: t.unsqueeze(0),
    "without rows": lambda d, t: t[:0],
    "without columns": lambda d, t: t[..., :0],
    "of one element": lambda d, t: d.place(value_of(t).flatten()[:1]),
    "of one row more": lambda d, t: d.place(torch.cat([value_of(t), value_of(t)[:1]])),
    "of one column less": lambda d, t: d.place(value_of(t)[..., 1:].contiguous()),
    "of 2^33 expanded values": lambda d, t: t.new_empty(1).fill_(0).expand(2**33),
    "of 2^31 x 2^31 expanded values": lambda d, t: t.new_empty(1).fill_(0).expand(2**31, 2**31),
    "of no value in 2^62 columns": lambda d, t: torch.empty(0, 2**62, dtype=t.dtype),
}
# An operator that writes must refuse these, or write them as torch's operators do.
ODD_TO_WRITE = (
    "a leaf that requires grad", "requires grad, no leaf", "an inference tensor", "negated",
    "expanded", "freed", "overlapping", "quantized", "quantized with a master", "meta",
    "the master of a quantized one", "transposed", "gathered", "codes", "of every second column",
    "quantized, a shard that waits",
)  # fmt: skip
# The memory of these is not their values in order: a call must give what it gives of plain copies.
VIEWS = {
    "transposed", "of every second column", "expanded", "overlapping", "negated",
    "negated imaginary part", "misaligned",
}  # fmt: skip
