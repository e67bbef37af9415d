"""digests and verify: whether a receiver has what the trainer multiplies by.

A tensor's digest is the sum modulo 2^64, over its elements, of mix64(word + mix64(plane * 2^60 + row * 2^30 + column)). mix64
is SplitMix64's. A code's word is its byte, or nibble, and its plane 0; a scale's word is its value's bits in fp32, and its
plane 1, or 2 for the scale of a whole tensor; the word of any other element is its own bits, of plane 0. Sums of ranks' parts
add up, so that no tensor is gathered for them.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from qshard.checkpoint.engines import ROWS
from qshard.checkpoint.planes import planes_of, tensors_of
from qshard.checkpoint.ranks import ToOne
from qshard.checkpoint.stream import planned, quantized_tensors

_FUNCTION = "qshard.checkpoint.digests"
_PLANES = {"codes": 0, "packed codes": 0, "plain": 0, "scales": 1, "packed scales": 1, "tensor scale": 2}
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAN = 0x7FC00000
_ELEMENTS = 2**20  # at once


class Digest(NamedTuple):
    """kind: "codes" of one byte, "packed codes", "scales", "packed scales", "tensor scale" or "plain"."""

    kind: str
    value: int


@torch.no_grad()
def digests(model: nn.Module, *, layout: str, **options) -> dict[str, Digest]:
    """{name: Digest} of every tensor that `quantized_tensors(model, layout=layout, **options)` yields, on all ranks. A
    collective, which sends one number of each tensor. They are equal on all meshes, but for weights that are
    quantized as a whole, as `quantized_tensors` says: those are gathered on one rank, and the digest is of what is sent.
    """
    parameters = list(inspect.signature(quantized_tensors).parameters.values())[1:]  # without the model
    arguments = {parameter.name: parameter.default for parameter in parameters} | {"layout": layout}
    unknown = sorted(options.keys() - arguments.keys())
    if unknown:
        raise TypeError(f"{_FUNCTION} got an unknown argument {unknown[0]!r}; it takes those of quantized_tensors")
    arguments |= options
    plan, ranks = planned(model, arguments.pop("names"), _FUNCTION, "the tensors' values", arguments)
    kinds, sums = {}, {}
    for unit in plan.units:
        for name in unit.tensors:
            kinds[name], sums[name] = _kind(unit, name, plan), 0
        if unit.is_requantized:
            _add_gathered(sums, kinds, unit, plan, ranks)
        else:
            _add_own(sums, kinds, unit, plan, ranks.rank)
    total = ranks.sum([_signed(value) for value in sums.values()])
    return {name: Digest(kind, value % 2**64) for (name, kind), value in zip(kinds.items(), total)}


def verify(named_tensors: Iterable[tuple[str, torch.Tensor]], digests: Mapping[str, tuple[str, int]]) -> None:
    """Raises ValueError that names tensors which are not those of `digests`, missing or unexpected. `digests` may come
    from JSON."""
    wrong, seen = [], set()
    columns = {}  # by names of codes
    for name, tensor in named_tensors:
        of_codes = name.removesuffix("_scale_inv")
        seen.add(name)
        if name not in digests:
            wrong.append(f"{name} is unexpected")
            continue
        kind, value = digests[name]
        if kind == "codes":
            columns[name] = tensor.shape[-1]
        if kind == "packed scales" and of_codes not in columns:
            raise ValueError(f"qshard.checkpoint.verify: {name} comes before the codes that it belongs to")
        if _digest(kind, tensor.detach(), columns.get(of_codes)) != value:
            wrong.append(f"{name} has other bytes")
    wrong += [f"{name} is missing" for name in digests if name not in seen]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise ValueError(f"qshard.checkpoint.verify: {', '.join(wrong[:3])}{more}; send these tensors again")


def _kind(unit, name, plan):
    if unit.is_plain:
        return "plain"
    scheme, suffix = plan.scheme, name.rpartition(".")[2]
    suffix = suffix.removeprefix("w13_").removeprefix("w2_") if unit.experts else suffix
    if suffix == scheme.codes:
        return "codes" if scheme.codes_per_byte == 1 else "packed codes"
    if suffix == scheme.scale:
        return "packed scales" if plan.packs_exponents else "scales"
    return "tensor scale"


def _digest(kind, tensor, columns=None):
    if kind == "packed scales":
        # A clone has a last stride of 1; what is contiguous may have another one where a dimension has one element.
        words = tensor[..., ::ROWS, :].clone(memory_format=torch.contiguous_format)
        exponents = words.view(torch.uint8)[..., : -(-columns // ROWS)]
        kind, tensor = "scales", exponents.view(torch.float8_e8m0fnu)
    if kind == "scales" and tensor.dtype == torch.uint8:
        tensor = tensor.view(torch.float8_e8m0fnu)
    if kind in ("codes", "scales"):  # stacks of them, too
        matrix = tensor.reshape(-1, tensor.shape[-1])
    else:
        matrix = tensor.reshape(tensor.shape[0], -1) if tensor.dim() else tensor.reshape(1, 1)
    return _sum(_words(kind, matrix), _PLANES[kind]) % 2**64


def _words(kind, matrix):
    """Words of rows, as they are asked for: those of all would be eight bytes for each code."""

    def of(begin, end):
        part = matrix[begin:end]
        if kind == "packed codes":
            return torch.stack([part & 15, part >> 4], -1).flatten(1).long()
        if kind in ("scales", "tensor scale"):
            bits = part.float().contiguous().view(torch.int32).long()
            return torch.where(part.float().isnan(), _NAN, bits)
        if part.dtype == torch.bool:
            return part.long()
        if part.is_complex():
            raise TypeError(f"{_FUNCTION}: {part.dtype} has no digest")
        return part.contiguous().view(_INTS[part.dtype.itemsize]).long()

    of.rows, of.columns = matrix.shape[0], matrix.shape[1] * (2 if kind == "packed codes" else 1)
    return of


def _mix64(x):
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ x >> shift & (1 << 64 - shift) - 1) * factor
    return x ^ x >> 31 & (1 << 33) - 1


def _sum(words, plane, row=0, columns=None):
    """Signed. row: of the first of these. columns: the numbers of theirs; None: from 0 on."""
    step, total, at = max(_ELEMENTS // max(words.columns, 1), 1), 0, None
    for begin in range(0, words.rows if words.columns else 0, step):
        part = words(begin, min(begin + step, words.rows))
        if at is None:
            at = torch.arange(words.columns, device=part.device) if columns is None else columns.to(part.device)
        rows = torch.arange(row + begin, row + begin + len(part), device=part.device)
        total += int(_mix64(part + _mix64(plane << 60 | rows[:, None] << 30 | at)).sum())
    return total


def _signed(value):
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


def _add_own(sums, kinds, unit, plan, rank):
    """This rank's part: of replicas the first counts."""
    names, planes = list(unit.tensors), planes_of(unit, plan)
    per_entry = len(planes) // len(unit.entries)
    rows_before = [0] * per_entry  # rows of the entries that are fused before
    for i, plane in enumerate(planes):
        number, boxes = i % per_entry, plan.boxes[unit.entries[i // per_entry].key].held
        if rank == min(other for other, box in boxes.items() if box == boxes[rank]):
            name = names[number] if unit.fused or unit.is_plain else names[i]
            sums[name] += _of_part(kinds[name], plane, boxes[rank], rank, rows_before[number], plan.scheme)
        rows_before[number] += plane.shape[0] if plane.shape else 0


def _of_part(kind, plane, held, rank, rows_before, scheme):
    part, place = plane.local, plane.boxes[rank]
    if not torch.Size(count for _, count in place).numel():
        return 0
    if kind == "plain":
        matrix = part.reshape(part.shape[0], -1) if part.dim() else part.reshape(1, 1)
        row = place[0][0] if place else 0
        return _sum(_words(kind, matrix), 0, rows_before + row, _columns(place, plane.shape))
    # A block is counted where it begins.
    skip = [int(first % size != 0) for (first, _), size in zip(held, plane.block)]
    part = part[skip[0] :, skip[1] :]
    (row, column), per_word = (first + one for (first, _), one in zip(place, skip)), 1
    if kind == "packed codes":
        per_word = 2
    elif kind == "tensor scale":
        part = part.reciprocal() if scheme.divides else part
    elif kind != "codes":
        kind, part = "scales", part.to(torch.float8_e8m0fnu) if scheme.is_ue8m0 else part
    columns = torch.arange(column * per_word, (column + part.shape[1]) * per_word)
    return _sum(_words(kind, part), _PLANES[kind], rows_before + row, columns)


def _columns(box, shape):
    """The numbers of the columns, in a matrix of the first dimension's rows, of a part of a tensor."""
    columns, stride = torch.zeros(1, dtype=torch.long), 1
    for (first, count), size in reversed(list(zip(box, shape))[1:]):
        own = torch.arange(first, first + count) * stride
        columns = (own[:, None] + columns).reshape(-1)
        stride *= size
    return columns


def _add_gathered(sums, kinds, unit, plan, ranks):
    planes = planes_of(unit, plan)
    pieces = ToOne(planes, ranks, 0).run()
    if pieces is not None:
        wholes = [plane.whole(of_plane) for plane, of_plane in zip(planes, pieces)]
        columns = unit.entries[0].shape[1]
        for name, tensor in tensors_of(unit, plan, wholes).items():
            sums[name] = _digest(kinds[name], tensor, columns)
