"""A call of fuzz_operators.py: its arguments, what they were before it, and what it gave."""

import fuzz_memory
import torch
from fuzz_arguments import Draw, value_of
from fuzz_methods import Method, methods
from torch._subclasses.fake_tensor import FakeTensor

from qshard._runtime.classes import Process, TensorState

ops = torch.ops.qshard
MOST_BYTES = 1 << 22  # of a tensor that is compared
REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)

# Operators whose purpose it is to change what a quantized tensor holds or knows.
CHANGES_ITS_TENSOR = {
    "flush", "_flush_after_step", "_mark_written", "_refresh_gathered", "_pre_all_gather", "_post_all_gather",
    "TensorState.set_groups", "TensorState.set_replicas", "TensorState.set_reduction_group",
    "TensorState.share_tensor_scale", "TensorState.set_rounding_key",
}  # fmt: skip


def schemas():
    """The schema of every operator, and every function of a class, by name."""
    found = {
        schema.name.removeprefix("qshard::"): schema
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("qshard::") and not schema.overload_name
    }
    return dict(sorted((found | methods()).items()))


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def is_real(t):
    return isinstance(t, torch.Tensor) and not isinstance(t, FakeTensor) and t.device.type == "cpu"


def is_plain(t):
    """Whether it has bytes that can be read as they lie."""
    is_strided = (
        is_real(t) and t.layout == torch.strided and not t.is_quantized and not t.is_nested
    )
    return is_strided and not is_quantized(t) and has_memory(t)


def is_quantized(t):
    return not t.is_nested and ops.is_quantized(t)


def has_memory(t):
    if t.layout != torch.strided:
        return False
    return t.numel() == 0 or t.untyped_storage().nbytes() > 0


def small(t):
    return t.untyped_storage().nbytes() <= MOST_BYTES and t.numel() <= MOST_BYTES


def content(value):
    """What a result is, to be compared with another call's."""
    if isinstance(value, (list, tuple)):
        return [content(item) for item in value]
    if isinstance(value, dict):
        return {key: content(item) for key, item in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    about = [value.dtype, tuple(value.shape)]
    if not is_real(value) or value.layout != torch.strided or value.is_nested or not small(value):
        return about
    if is_quantized(value):
        try:
            data, pending, layout, format, state = TensorState(value.detach()).pack()
            return about + [bits(data), format, list(layout), [bits(s) for s in state]]
        except (
            Exception
        ):  # freed, too large for this process, with state that no tensor should have
            return about
    if value.numel() and value.untyped_storage().nbytes() == 0:
        return about
    return about + [bits(value.detach())]


def bits(t):
    t = t.detach().resolve_neg().resolve_conj().flatten().clone(memory_format=torch.contiguous_format)
    if t.is_quantized:
        t = t.int_repr()
    return t.view(torch.uint8).numpy().tobytes()


# ---------------------------------------------------------------------------------- arguments


class Snapshot:
    """What a call may not write, and what it may, as it was before."""

    def __init__(self, schema, positional, keywords):
        names = [a.name for a in schema.arguments if not a.kwarg_only]
        self.values = dict(zip(names, positional)) | keywords
        written = [
            a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
        ]
        self.operator = schema.name.removeprefix("qshard::")
        self.plain, self.quantized = {}, []
        for name, value in self.values.items():
            for t in tensors_in(value):
                if is_plain(t) and small(t):
                    self.plain.setdefault(
                        t.untyped_storage()._cdata, (name, storage_bytes(t).clone(), t)
                    )
                elif is_real(t) and is_quantized(t) and name not in written and has_memory(t):
                    self.note_quantized(name, t)
        # With the version that each had.
        self.mutable = [
            (t, None if t.is_inference() else t._version)
            for name in written
            for t in tensors_in(self.values[name])
        ]

    def note_quantized(self, name, t):
        if self.operator in CHANGES_ITS_TENSOR:
            return
        try:
            is_written = TensorState(t.detach()).pack()[2][6]
            if not is_written:
                self.quantized.append((name, bits(value_of(t)), t))
        except REFUSALS:
            pass

    def changed(self, is_error):
        """A line on each argument that changed and should not have; after an error, on any."""
        allowed = {}
        for t, _ in [] if is_error else self.mutable:
            if is_plain(t) and small(t):
                allowed.setdefault(t.untyped_storage()._cdata, []).append(t)
        for key, (name, before, t) in self.plain.items():
            after = storage_bytes(t)
            if after.numel() != before.numel():
                continue
            differs = after != before
            if not differs.any():
                continue
            for writable in allowed.get(key, ()):
                differs &= ~elements_of(writable)
            if differs.any():
                yield f"{int(differs.sum())} bytes of {name}, or beside it"
        for name, before, t in self.quantized:
            if bits(value_of(t)) != before:
                yield f"the value of {name}, a quantized tensor"


def storage_bytes(t):
    return torch.tensor([], dtype=torch.uint8).set_(t.untyped_storage())


def elements_of(t):
    """A mask of the bytes of a tensor's storage that are its elements."""
    mask = torch.zeros(t.untyped_storage().nbytes(), dtype=torch.bool)
    whole = mask[: mask.numel() // t.itemsize * t.itemsize].view(-1, t.itemsize)
    rows = torch.zeros(len(whole), dtype=torch.bool)
    places = torch.arange(len(whole)).as_strided(t.shape, t.stride(), t.storage_offset())
    rows[places.flatten()] = True
    whole[:] = rows.unsqueeze(1)
    return mask


# ------------------------------------------------------------------------------------ the call


class Attempt:
    """Arguments made from the seed, one call, and what came of it. `fill`: what new memory holds.
    `resolved`: views are contiguous tensors of their own."""

    def __init__(self, schema, seed, memory, tell, fill=0x11, resolved=False):
        memory.reset()
        fuzz_memory.fill_new_memory(fill)
        self.schema, self.operator = schema, schema.name.removeprefix("qshard::")
        tell("its arguments are made")
        draw = Draw(schema, seed, memory)
        positional, keywords = draw.arguments()
        self.notes, self.masters = draw.notes, draw.masters
        if resolved:
            positional, keywords = resolve(positional), resolve(keywords)
        self.snapshot = Snapshot(schema, positional, keywords)
        self.error = self.result = None
        notes = ", ".join(f"{name}: {note}" for name, note in self.notes.items())
        tell(f"{notes}{'; again' * (fill != 0x11)}{'; with plain copies' * resolved}")
        try:
            call = schema.call if isinstance(schema, Method) else getattr(ops, self.operator).default
            self.result = call(*positional, **keywords)
        except Exception as error:
            self.error = error
        finally:
            Process.set_in_step(False)
            Process.make_shards(None)
            Process.set_fallback_tracing(False)

    def given(self):
        return list(tensors_in(self.snapshot.values))

    def content(self):
        """The bytes of the results, and of what was written."""
        return content([self.result, [t for t, _ in self.snapshot.mutable]])

    def has_fakes(self):
        return any(isinstance(t, FakeTensor) for t in self.given())


def resolve(value):
    if isinstance(value, (list, tuple)):
        return [resolve(item) for item in value]
    if isinstance(value, dict):
        return {key: resolve(item) for key, item in value.items()}
    if not is_plain(value) or not small(value) or value.is_complex():
        return value
    copy = value.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
    return copy.requires_grad_(value.requires_grad)
