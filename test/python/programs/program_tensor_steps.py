"""Steps of random programs on single tensors: views, writes, copies, reads, errors. See
program_steps.py."""

import copy
import io
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dist_helpers import device
from helpers import is_quantized, ops
from program_meshes import own_part
from program_steps import step
from program_values import (
    difference,
    has_pending,
    implausible,
    local_rows,
    plain_value,
    rounded_like,
    whole,
    whole_buffer,
)
from qshard._runtime.classes import TensorState

# ----------------------------------------------------------------------------------- views


def between(tensor, dim, first, last):
    size = tensor.size(dim)
    return int(first * size), int(last * size)


def rows(tensor, first, last):
    start, end = between(tensor, 0, first, last)
    return tensor[start:end]


def cols(tensor, first, last):
    start, end = between(tensor, -1, first, last)
    return tensor[..., start:end]


def narrow(tensor, first, last):
    start, end = between(tensor, 0, first, last)
    return tensor.narrow(0, start, end - start)


def split(tensor, which):
    pieces = tensor.split(max(1, tensor.size(0) // 3))
    return pieces[int(which * len(pieces))]


def as_strided(tensor, part):
    """The last columns of every second row, by numbers; no element twice."""
    count, stride = (tensor.size(0) + 1) // 2, 2 * tensor.stride(0)
    if tensor.dim() == 1:
        return tensor.as_strided((count,), (stride,))
    size = tensor.size(-1)
    first = int(part * size)
    offset = tensor.storage_offset() + first * tensor.stride(-1)
    return tensor.as_strided((count, size - first), (stride, tensor.stride(-1)), offset)


VIEWS = {
    "rows": rows,
    "cols": cols,
    "narrow": narrow,
    "t": lambda t: t.t(),
    "every": lambda t, step: t[::step],
    "strided": lambda t, step: t[..., ::step],
    "flat": lambda t: t.view(-1),
    "split": split,
    "unsqueeze": lambda t: t.unsqueeze(0),
    "expand_as": lambda t: t.expand_as(t),
    "as_strided": as_strided,
    "diagonal": lambda t: t.diagonal(),
    "row": lambda t, part: t.select(0, int(part * t.size(0))),
    "col": lambda t, part: t.select(-1, int(part * t.size(-1))),
}


def window(subject, target, view):
    return through(subject.tensor(target), view)


def through(tensor, view):
    for kind, *args in view:
        tensor = VIEWS[kind](tensor, *args)
    return tensor


# ---------------------------------------------------------------------------------- writes


def random_like(tensor, seed):
    """Random values of a tensor's shape and dtype, others for each share of the rows."""
    generator = torch.Generator().manual_seed(1000 * seed + own_part())
    return torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)


def mask_like(tensor, seed):
    return random_like(tensor, seed) > 0.3


def fill_at_random(tensor, number, seed):
    torch.manual_seed(seed)
    tensor.normal_(0, abs(number))


def zero_index(tensor):
    return torch.zeros(1, dtype=torch.int64, device=tensor.device)


def set_by_mask(tensor, number, seed):
    tensor[mask_like(tensor, seed)] = number


def index_fill(tensor, number, seed):
    """An index outside ends a process that has a GPU; elsewhere it is an error."""
    if not tensor.is_cuda or tensor.size(-1) > 0:
        tensor.index_fill_(-1, zero_index(tensor), number)


def foreach_mul(tensor, number, seed):
    """One row twice; not on GPUs, whose kernel writes all of a list at once."""
    if tensor.is_inference():  # torch raises when it has written the first of a list
        return tensor.mul_(number)
    torch._foreach_mul_([tensor[1:] if tensor.is_cuda else tensor, tensor[:1]], number)


WRITES = {
    "mul_": lambda t, number, seed: t.mul_(number),
    "add_": lambda t, number, seed: t.add_(number),
    "fill_": lambda t, number, seed: t.fill_(number),
    "zero_": lambda t, number, seed: t.zero_(),
    "copy_": lambda t, number, seed: t.copy_(random_like(t, seed)),
    "copy_ row": lambda t, number, seed: t.copy_(random_like(t[:1], seed)),
    "add_ tensor": lambda t, number, seed: t.add_(random_like(t, seed), alpha=number),
    "masked_fill_": lambda t, number, seed: t.masked_fill_(mask_like(t, seed), number),
    "set by mask": set_by_mask,
    "clamp_": lambda t, number, seed: t.clamp_(-abs(number), abs(number)),
    "lerp_": lambda t, number, seed: t.lerp_(random_like(t, seed), 0.25),
    "addcmul_": lambda t, number, seed: t.addcmul_(random_like(t, seed), random_like(t, seed + 1)),
    "index_fill_": index_fill,
    "normal_": fill_at_random,
    "out=": lambda t, number, seed: torch.mul(t, number, out=t),
    "+=": lambda t, number, seed: t.__iadd__(number),
    "foreach": foreach_mul,
}


def draw_write(d):
    target, op = d.target(), d.choice(WRITES)
    view = d.view(target)
    if op == "index_fill_" and d.setup.sharded:
        target, view = "w0", ()  # an index needs columns: see Draw.view
    return {
        "target": target,
        "view": view,
        "op": op,
        "number": d.number(),
        "seed": d.seed(),
    }


@step(9, draw_write)
@torch.no_grad()
def write(subject, target, view, op, number, seed):
    WRITES[op](window(subject, target, view), number, seed)


def draw_move(d):
    """Mostly between windows that have the same shape: of a parameter and of its copies."""
    to, view = d.target(), ()
    if d.chance(0.7):
        view = (("rows", *d.interval()),)
    source = d.choice([*d.registers, to, d.parameter()])
    return {"to": to, "to_view": view, "source": source, "view": view if d.chance(0.8) else ()}


@step(3, draw_move)
@torch.no_grad()
def move(subject, to, to_view, source, view):
    target, source = window(subject, to, to_view), window(subject, source, view)
    if subject.setup.sharded and not on_all_ranks(target.shape == source.shape):
        source = torch.ones(1, device=target.device)  # see Draw.view
    target.copy_(source)


def on_all_ranks(condition):
    agreed = torch.tensor([condition], dtype=torch.int32, device=device())
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return bool(agreed)


@step(2, lambda d: {"targets": (d.target(), d.target()), "op": d.choice(FOREACH), "seed": d.seed()})
@torch.no_grad()
def foreach(subject, targets, op, seed):
    if device().type == "cuda":  # torch's kernel writes all of a list at once: one that is there twice races
        targets = {subject.home(name): name for name in targets}.values()
    tensors = [subject.tensor(name) for name in targets]
    tensors = [tensor for tensor in tensors if not tensor.is_inference()]  # as in foreach_mul
    FOREACH[op](tensors, [random_like(t, seed) for t in tensors])


FOREACH = {
    "mul_": lambda tensors, others: torch._foreach_mul_(tensors, 0.5),
    "add_": lambda tensors, others: torch._foreach_add_(tensors, others),
    "copy_": lambda tensors, others: torch._foreach_copy_(tensors, others),
    "lerp_": lambda tensors, others: torch._foreach_lerp_(tensors, others, 0.5),
    "zero_": lambda tensors, others: torch._foreach_zero_(tensors),
}


# ----------------------------------------------------------------------- new tensors from old


def saved_and_loaded(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def copied_to_new_zeros(tensor, extra=0):
    new = tensor.new_zeros(tensor.size(0) + extra, *tensor.shape[1:])
    new[: tensor.size(0)].copy_(tensor)
    return new


# What each makes is independent of its source, but for the views.
MAKERS = {
    "clone": lambda t: t.clone(),
    "clone dense": lambda t: t.clone(memory_format=torch.contiguous_format),
    "to copy": lambda t: t.to(t.device, copy=True),
    "to copy non_blocking": lambda t: t.to(t.device, copy=True, non_blocking=True),
    "to bfloat16": lambda t: t.to(torch.bfloat16, copy=True),
    "to float32": lambda t: t.to(torch.float32, copy=True),
    "to float64": lambda t: t.double(),
    "deepcopy": copy.deepcopy,
    "pickle": saved_and_loaded,
    "empty_like, fill_": lambda t: torch.empty_like(t).fill_(2.0),
    "empty_like, copy_": lambda t: torch.empty_like(t).copy_(t),
    "empty_like, rows": lambda t: torch.empty_like(t).fill_(1.0)[: max(1, t.size(0) // 2)],
    "new_zeros": lambda t: t.new_zeros(t.shape),
    "new_zeros, copy_": copied_to_new_zeros,
    "new_zeros padded, copy_": lambda t: copied_to_new_zeros(t, 3),
    "new_empty, fill_": lambda t: t.new_empty(t.shape).fill_(-1.5),
    "new_empty, copy_": lambda t: t.new_empty(t.shape).copy_(t),
    "zeros_like": torch.zeros_like,
    "pad rows": lambda t: F.pad(t, (0, 0, 0, 3)),
    "pad rows before": lambda t: F.pad(t, (0, 0, 2, 0)),
    "pad columns": lambda t: F.pad(t, (1, 2)),
    "pad by ones": lambda t: F.pad(t, (0, 0, 0, 1), value=1.0),
    "stack": lambda t: torch.stack([t, t]),
    "cat": lambda t: torch.cat([t, t]),
    "cat again": lambda t: torch.cat([t[: t.size(0) // 2], t[t.size(0) // 2 :]]),
    "cat out of order": lambda t: torch.cat([t[t.size(0) // 2 :], t[: t.size(0) // 2]]),
    "contiguous": lambda t: t.contiguous() if not t.is_contiguous() else t.clone(),
    "flip": lambda t: t.flip(0),
    "index_select": lambda t: t[torch.arange(t.size(0), device=t.device)],
    "times one": lambda t: t * 1,
    "parameter": lambda t: torch.nn.Parameter(t.clone()).detach(),
    "chunk, cat": lambda t: torch.cat(t.chunk(3)),
}
ALIASES = {
    "view": lambda t: t,
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "shallow copy": copy.copy,
    "parameter alias": lambda t: torch.nn.Parameter(t).detach(),
}


def made(subject, target, view, by):
    return MAKERS[by](window(subject, target, view))


def draw_make(d, makers):
    target = d.target()
    view = d.view(target)
    return {"target": target, "view": view, "by": d.choice(makers), "into": d.new_register()}


@step(8, lambda d: draw_make(d, MAKERS), reads=True)
@torch.no_grad()
def make(subject, target, view, by, into):
    keep_made(subject, into, made(subject, target, view, by), by)


# Documented: these may be the share that their source is, and scales that it shares wait for others.
KEEPS_SHARE = ("deepcopy", "pickle", "empty_like", "new_empty", "new_zeros")


def keep_made(subject, name, tensor, by):
    subject.keep(name, tensor)
    if by.startswith(KEEPS_SHARE):
        subject.shares.add(name)
    # Documented: narrower copies round the value, and keep codes that were rounded from the wider one.
    if tensor.dtype != subject.setup.dtype:
        subject.narrowed.add(name)


@step(2.5, lambda d: {**draw_make(d, MAKERS), "number": d.number()}, reads=True)
@torch.no_grad()
def make_then_write(subject, target, view, by, number, into):
    """A write that follows at once leaves a copy alone, also one that is not yet made."""
    copied = made(subject, target, view, by)
    yield
    subject.tensor(target).mul_(number)
    yield
    keep_made(subject, into, copied, by)


@step(2.5, lambda d: draw_make(d, ALIASES), reads=True)
@torch.no_grad()
def alias(subject, target, view, by, into):
    subject.keep(into, ALIASES[by](window(subject, target, view)), home=subject.home(target))


# ------------------------------------------------------------------------------------ reads


@dataclass
class Codes:
    """What a quantized tensor shows of its value; of a twin, the value itself."""

    values: torch.Tensor
    shown: torch.Tensor | None = None
    exact: torch.Tensor | None = None  # what must be shown, where that is known
    disagreement: str | None = None  # of two ways to read the same codes

    def compare(self, twin):
        if self.shown is None:
            return None  # stayed, or became, plain
        if self.disagreement:
            return self.disagreement
        if self.exact is not None:
            return difference(self.shown, self.exact)
        return implausible(self.shown, twin.values)


def exact_codes(subject, target):
    """What the codes of a target must show once they are flushed, or None where other ranks, or a wider
    value before, decide. All ranks come here."""
    tensor = subject.tensor(target)
    if not is_quantized(tensor):
        return None
    if subject.setup.sharded and target[0] == "w" and TensorState(tensor).keeps_master():
        twin = subject.twin.params[f"layers.{target[1:]}.weight"]
        shown = local_rows(rounded_like(whole(twin), tensor), twin)
        # Documented: before its first gather, step or flush a shard has scales of its own.
        is_adopted = TensorState(tensor).pack()[2][-1]
        return shown if is_adopted or subject.ranks == 1 else None
    if not TensorState(tensor).keeps_master() and not has_pending(tensor):
        return plain_value(tensor)
    matrix = whole_buffer(tensor)
    if matrix is None or subject.home(target) in subject.narrowed:
        return None
    shown = rounded_like(plain_value(matrix), matrix)
    return shown.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def draw_read(d):
    target = d.target()
    return {"target": target, "view": d.view(target), "seed": d.seed()}


@step(4, draw_read, reads=True)
@torch.no_grad()
def read_codes(subject, target, view, seed):
    """linear and dequantize. Not of columns or odd windows: a linear's weight is a window of rows."""
    view = tuple(v for v in view if v[0] in ("rows", "narrow", "split"))
    exact = exact_codes(subject, target) if subject.quantized else None
    tensor = window(subject, target, view)
    if not is_quantized(tensor):
        return Codes(tensor)
    codes = Codes(plain_value(tensor), ops.dequantize(tensor))
    codes.exact = None if exact is None else through(exact, view)
    if tensor.dim() == 2 and tensor.is_contiguous() and tensor.numel() > 0:
        x = random_like(codes.shown[:3], seed)
        y = F.linear(x, tensor)
        if tensor.device.type == "cpu":
            codes.disagreement = difference(y, F.linear(x, codes.shown))
    return codes


VALUES = {
    "sum": lambda t: t.sum(),
    "times two": lambda t: t * 2,
    "norm": torch.linalg.vector_norm,
    "list": lambda t: torch.tensor(t.tolist()),
    "float": lambda t: t.float() + 1,
    "max": lambda t: t.amax(),
    "text": lambda t: torch.tensor([ord(c) for c in str(t)][:40]) if t.numel() < 50 else None,
    "equal": lambda t: torch.tensor(torch.equal(t, t)),
    "numpy": lambda t: (t * 1).cpu().float().numpy().sum(),
    "cat": lambda t: torch.cat([t.reshape(-1), t.reshape(-1)]),
}


@step(2, lambda d: {**draw_read(d), "how": d.choice(VALUES)}, reads=True)
@torch.no_grad()
def read_value(subject, target, view, seed, how):
    return VALUES[how](window(subject, target, view))


# ----------------------------------------------------------------------------------- errors

BAD = {
    "add_ shape": lambda t: t.add_(torch.ones(t.size(0) + 3, 2, device=t.device)),
    "copy_ shape": lambda t: t.copy_(torch.ones(t.size(0) + 2, t.size(-1) + 1, device=t.device)),
    "view": lambda t: t.view(t.numel() + 1),
    "index": lambda t: t[t.size(0) + 5],
    "mm": lambda t: torch.mm(t, torch.ones(t.size(-1) + 1, 2, device=t.device, dtype=t.dtype)),
    "linear": lambda t: F.linear(torch.ones(2, t.size(-1) + 1, device=t.device, dtype=t.dtype), t),
    "fill_": lambda t: t.fill_(torch.ones(2, device=t.device)),
    "masked_fill_": lambda t: t.masked_fill_(torch.ones(t.size(0) + 2, 7).bool(), 1.0),
    "as_strided": lambda t: t.as_strided((10**5, 10**3), (10**3, 1)),
    "cat": lambda t: torch.cat([t, t[..., :-1]]),
    "expanded": lambda t: t[:1].expand(4, *t.shape[1:]).mul_(2),
    "foreach": lambda t: torch._foreach_add_([t, t], [torch.ones(t.size(0) + 3, 2)] * 2),
    "dtype": lambda t: t.bitwise_or_(1),
    "index_fill_": lambda t: t.index_fill_(-1, bad_index(t), 1.0),
}


def bad_index(t):
    """Out of bounds; on a GPU, where that ends the process, of a wrong dtype."""
    return zero_index(t).float() if t.is_cuda else zero_index(t) + t.size(-1) + 4


def draw_fail(d):
    how = d.choice(BAD)
    if how == "index_fill_" and d.setup.sharded:
        return None  # tensors without elements take any index: see Draw.view
    return {"target": d.target(), "how": how}


@step(2, draw_fail)
@torch.no_grad()
def fail(subject, target, how):
    BAD[how](subject.tensor(target))
