"""What can be wrong with a call of fuzz_operators.py: each check yields pairs (kind, text)."""

import gc
import re

import torch
from fuzz_arguments import MESSAGES, VIEWS, value_of
from fuzz_calls import (
    MOST_BYTES,
    REFUSALS,
    Attempt,
    bits,
    has_memory,
    is_plain,
    is_quantized,
    is_real,
    tensors_in,
)
from torch._subclasses.fake_tensor import FakeTensor

from qshard._runtime.classes import TensorState

ops = torch.ops.qshard
LONGEST_ERROR = 1000
INSIDES = re.compile(
    r"INTERNAL ASSERT|report a bug|unknown exception|std::|vector::|basic_string|map::at|bad_"
)
ALLOCATOR = re.compile(r"can't allocate|not enough memory|overflow|Storage size|std::bad_alloc")
# What torch says before an operator of ours is called, or of a device that is not there.
TORCHS = re.compile(
    r"Could not run 'qshard::|CUDA error|Torch not compiled|Found no NVIDIA|qshard::\w+\(\)|"
    r"quantized nyi in meta tensors"
)
# These look at the kind of tensors alone.
MIXES_DEVICES = {
    "is_quantized", "_can_normalize", "_norm_linear_reads_codes",
}  # fmt: skip
GIVES_ITS_INPUT_BACK = {"norm_linear"}
ROWS, COLUMNS, LOGICAL_ROWS, MATRIX_ROWS, ROW_OFFSET = range(5)  # of what TensorState.pack gives as layout


def try_call(schema, seed, memory, tell):
    """(outcome, notes, what is wrong, the error's text). `tell(text)` is told what comes next."""
    first = Attempt(schema, seed, memory, tell)
    found = [
        ("half written" if first.error else "undeclared write", text)
        for text in first.snapshot.changed(is_error=first.error is not None)
    ]
    if not memory.is_whole():
        found.append(("write before a tensor", "bytes before a tensor's first changed"))
    if first.error is None:
        found += check_success(first, seed, memory, tell)
    else:
        found += check_error(first.operator, first.error)
    text = "" if first.error is None else f"{type(first.error).__name__}: {first.error}"
    outcome, notes = "done" if first.error is None else "error", first.notes
    del first
    gc.collect()
    return outcome, notes, found, text


def check_error(operator, error):
    text = str(error)
    described = f"{type(error).__name__}: {text}"
    if not isinstance(error, REFUSALS) or INSIDES.search(text) or not text:
        yield "assert", described[:LONGEST_ERROR]
    elif TORCHS.match(text):
        return
    elif len(text) > LONGEST_ERROR:
        yield "long error", f"{len(text)} characters: {described[:300]}"
    elif not names_operator(text, operator):
        yield "allocator's error" if ALLOCATOR.search(text) else "unnamed error", described[:400]


def names_operator(text, operator):
    """By its name, or by that of its whole or part, as linear_forward is a part of linear."""
    operator = operator.lstrip("_")
    named = re.findall(r"qshard(?:::|\.)_?(\w+)", text)
    return any(operator.startswith(name) or name.startswith(operator) for name in named)


def check_success(first, seed, memory, tell):
    made = first.content()
    if mixed := list(check_devices(first)):  # and what follows from it
        yield from mixed
        return
    for check in (check_names, check_counters, check_results):
        yield from check(first)
    for t in (*tensors_in(first.result), *first.given()):
        yield from check_uses(t, tell)
    second = Attempt(first.schema, seed, memory, tell, fill=0xEE)
    if second.error is not None:
        yield "differs when repeated", f"now {type(second.error).__name__}: {second.error}"[:300]
        return
    if (again := second.content()) != made:
        yield "uninitialised result", where(made, again)
    yield from check_codes(second)
    if VIEWS & set(second.notes.values()):
        third = Attempt(first.schema, seed, memory, tell, resolved=True)
        if third.error is None and not is_near(made, third.content()):
            yield "reads a view as memory", "plain copies of the views give something else"


def check_devices(attempt):
    """Fake tensors may be with real ones."""
    devices = {t.device.type for t in attempt.given() if not isinstance(t, FakeTensor)}
    if len(devices) > 1 and attempt.operator not in MIXES_DEVICES:
        yield "mixed devices", f"tensors on {sorted(devices)} were taken"


def check_names(attempt):
    """Formats that there are not."""
    for argument, value in attempt.snapshot.values.items():
        if "format" not in argument or value is None:
            continue
        for format in [value] if isinstance(value, str) else value:
            if format not in MESSAGES and not is_format(format):
                yield "unknown format taken", f"{argument} {format[:80]!r}"


def is_format(name):
    try:
        ops.quantize(torch.zeros(32, 32, device="meta"), name)
        return True
    except (ValueError, RuntimeError):
        return False


def check_counters(attempt):
    """What autograd has to know of a write."""
    for t, version in [] if attempt.has_fakes() else attempt.snapshot.mutable:
        if t.numel() == 0 or t.is_meta:
            continue
        if t.requires_grad and t.is_leaf:
            yield "writes a leaf", "a leaf that requires grad was taken to be written"
        if version is not None and t._version == version:
            yield "no version bump", "a declared mutation moved no version counter"


def check_results(attempt):
    is_alias = any(r.alias_info is not None for r in attempt.schema.returns)
    given = {id(t) for t in attempt.given()} if attempt.operator in GIVES_ITS_INPUT_BACK else ()
    for t in tensors_in(attempt.result):
        if is_plain(t) and not is_alias and id(t) not in given and overlaps(t):
            yield "overlapping result", f"strides {t.stride()} of shape {tuple(t.shape)}"
        if is_real(t) and is_quantized(t) and has_memory(t):
            yield from check_layout(t)
    if type(attempt.result) is int and attempt.result < 0:
        yield "nonsense", f"gave {attempt.result}"


def overlaps(t):
    """Whether two elements of a tensor are one in memory."""
    if not 1 < t.numel() <= 1 << 16:
        return False
    places = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(t.shape, t.stride()):
        places = (places.unsqueeze(-1) + torch.arange(size) * stride).flatten()
    return places.unique().numel() < t.numel()


def check_layout(t):
    try:
        layout = TensorState(t.detach()).pack()[2]
    except REFUSALS:
        return
    if min(layout[: ROW_OFFSET + 1]) < 0 or layout[ROW_OFFSET] > layout[LOGICAL_ROWS]:
        rows, first, all_rows = layout[ROWS], layout[ROW_OFFSET], layout[LOGICAL_ROWS]
        yield "nonsense", f"a tensor of {rows} rows, from {first} of {all_rows} on"


def check_codes(attempt):
    """A quantized tensor that was given to be written, or whose master was, shows its value."""
    written = {id(t) for t, _ in attempt.snapshot.mutable}
    quantized = [
        t for t, _ in attempt.snapshot.mutable if is_real(t) and is_quantized(t) and has_memory(t)
    ]
    quantized += [q for q, master in attempt.masters if id(master) in written]
    for q in quantized:
        try:
            shown = ops.dequantize(q.detach())
            wanted = ops.dequantize(ops.quantize(value_of(q), ops.format(q)))
        except REFUSALS:  # a shard that waits for other ranks
            continue
        if bits(shown) != bits(wanted):
            yield "stale codes", "a quantized tensor was written, and its codes are old"


def check_uses(t, tell):
    """Whatever a user does next with a tensor; errors may say anything but what asserts say."""
    if isinstance(t, FakeTensor) or t.is_nested or not has_memory(t) or t.numel() > MOST_BYTES:
        return
    uses = {"clone": lambda: t.detach().clone()}
    if is_quantized(t):
        for name in ("dequantize", "codes", "scale_inv", "master"):
            uses[name] = lambda read=getattr(ops, name): read(t.detach())
        uses["storage_bytes"] = lambda: TensorState(t.detach()).storage_bytes()
        uses["pack"] = lambda: TensorState(t.detach()).pack()
        if t.numel() <= 40:
            uses["repr"] = lambda: repr(t.detach())
        uses["+ 1"] = lambda: t.detach() + 1
        uses["written"] = lambda: torch.no_grad()(t.detach().mul_)(1)
        uses["flush"] = lambda: ops.flush([t.detach()])
        uses["a step"] = lambda: ops._flush_after_step([t.detach()], [0], [True], None)
        uses["linear"] = lambda: ops.linear(torch.ones(2, t.shape[-1]), t.detach())
    elif t.grad_fn is not None and t.is_floating_point():
        uses["backward"] = lambda: t.sum().backward(retain_graph=True)
    for name, each in uses.items():
        tell(f"later, {name}")
        try:
            each()
        except Exception as error:
            if not isinstance(error, REFUSALS) or INSIDES.search(str(error)):
                yield "assert later", f"{name}: {type(error).__name__}: {error}"[:300]


# -------------------------------------------------------------------------------- comparisons


def where(a, b, path=""):
    """The first place in which two results differ."""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b)):
            if x != y:
                return where(x, y, f"{path}[{i}]")
    if isinstance(a, bytes) and isinstance(b, bytes) and len(a) == len(b):
        places = [i for i, (x, y) in enumerate(zip(a, b)) if x != y]
        return f"{path}: {len(places)} of {len(a)} bytes, from {places[0]} to {places[-1]}"
    return f"{path}: {str(a)[:80]} and {str(b)[:80]}"


def is_near(a, b):
    """Whether results are equal but for the order of sums."""
    if not isinstance(a, list) or not isinstance(b, list) or len(a) != len(b):
        return a == b
    is_values = len(a) == 3 and isinstance(a[0], torch.dtype) and isinstance(a[2], bytes)
    if a[:2] != b[:2] or not (is_values and a[0].is_floating_point and a[0].itemsize > 1):
        return all(is_near(x, y) for x, y in zip(a, b))
    if not a[2]:
        return True
    x, y = (torch.frombuffer(bytearray(each), dtype=a[0]).double() for each in (a[2], b[2]))
    return torch.allclose(
        x, y, rtol=0.02, atol=0.02 * float(x.nan_to_num(0, 0, 0).abs().max()), equal_nan=True
    )
