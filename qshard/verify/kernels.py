"""The CUDA kernels, by the operators that run them: their bits beside those of the CPU."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from qshard._runtime.classes import TensorState
from qshard.formats import info_of
from qshard.verify.inputs import emulated, fit, short, uniform, values
from qshard.verify.rows import Row, checked, compare_bits
from qshard.verify.timing import Clock

ops = torch.ops.qshard
CPU = torch.device("cpu")
SHAPES = ((131, 47), (1, 200), (257, 1040))
LARGE = (4096, 8192)
ROUNDED = ("float8_blockwise[stochastic]", "mxfp8[stochastic]", "nvfp4[stochastic]")
Parts = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Timed:
    call: Callable[[], object]
    bytes: int  # read and written
    before: Callable[[], object] = lambda: None  # each call, and not timed


@dataclass(frozen=True)
class Case:
    """What an operator makes of inputs that are the same on each device, and its time on a large one."""

    what: str
    format: str
    shape: tuple[int, ...]
    parts: Callable[[torch.device], Parts]
    timed: Callable[[torch.device], Timed] | None = None


def rows(cases: Iterator[Case], device: torch.device, clock: Clock | None) -> Iterator[Row]:
    for case in cases:
        row = Row(case.what, "kernel", case.format, "x".join(map(str, case.shape)), "")
        yield checked(row, lambda row: _check(row, case, device, clock))


def _check(row: Row, case: Case, device: torch.device, clock: Clock | None) -> None:
    compare_bits(row, case.parts(device), case.parts(CPU))
    if case.timed is not None and clock is not None:
        timed = case.timed(device)
        row.us = clock.us(timed.call, timed.before)
        row.of_copy = clock.us_of_copy(timed.bytes) / row.us


def cases(formats: list[str], large: tuple[int, int] = LARGE) -> Iterator[Case]:
    """All of them; the largest of each kind is timed."""
    for format in formats:
        for shape in (*SHAPES, large):
            yield _weight(format, (fit(format, shape[0]), shape[1]), shape is large)
            yield _update(format, (fit(format, shape[0]), shape[1]), shape is large)
        yield _adamw(format, (fit(format, 35), 20))
        yield _adamw(format, (fit(format, large[0] // 2), large[1]))
    for format in ROUNDED:
        yield _adamw(format, (35, 20))
    for format in filter(_is_packed, [*formats, "float8_blockwise[x_block_scaling_dim=1]"]):
        for shape in (*SHAPES, large):
            yield _operand(format, shape, shape is large)
    for format in filter(_has_gradients_of_losses, formats):
        for shape in (*SHAPES, large):
            yield _loss(format, shape, shape is large)
    for format in filter(lambda format: info_of(format).amax_history is not None, formats):
        yield _history(format, (128, 96))
    for hadamard in (False, True):
        for shape in (*SHAPES, large):
            yield _transposed(hadamard, shape, shape is large)
    for format in filter(lambda format: info_of(format).code_bits == 8, formats):
        for shape in ((35, 200), large):
            yield from _message(format, shape, shape is large)
    for format in ("float8", "mxfp8", "nvfp4"):
        for count in (4500, large[0] * large[1] // 2):
            yield from _gradient_message(format, count, count != 4500)
    for sizes in ((2, 17, 4, 96), (2, large[0] // 4, 16, 128)):
        yield from _rotary(sizes, sizes[1] > 17)
    for shape in (*SHAPES, large):
        yield _sums(shape, shape is large)


# ---------------------------------------------------------------------------------------- weights


def planes(q: torch.Tensor) -> Parts:
    """Codes and scales of a quantized tensor, and what it shows."""
    info = info_of(ops.format(q))
    found = {"values": ops.dequantize(q), "codes": ops.codes(q), "scales": ops.scale_inv(q)}
    if info.outer_scale is not None:
        found["tensor scale"] = ops.tensor_scale_inv(q)
    if info.columnwise is not None:
        found |= {"columnwise codes": ops.columnwise_codes(q), "columnwise scales": ops.columnwise_scale_inv(q)}
    return {name: part.clone() for name, part in found.items()}


def _image_bytes(q: torch.Tensor) -> int:
    sizes = TensorState(q).storage_bytes()
    return sizes["image"] + sizes["grid"]


def _weight(format: str, shape, is_large: bool) -> Case:
    def parts(device) -> Parts:
        made = planes(ops.quantize(values(*shape, special=not is_large).to(device), format))
        if not is_large:
            half = values(*shape, seed=1, dtype=torch.bfloat16).to(device)
            made |= {f"{name}, bfloat16": part for name, part in planes(ops.quantize(half, format)).items()}
        return made

    def timed(device) -> Timed:
        q = ops.quantize(values(*shape).to(device), format)
        return Timed(lambda: ops.dequantize(q, dtype=torch.bfloat16), _image_bytes(q) + 2 * q.numel())

    return Case("quantize, dequantize", format, shape, parts, timed if is_large else None)


def _update(format: str, shape, is_large: bool) -> Case:
    """Updates by hand, and what flushes make of them. The time is that of a flush of the master."""

    def parts(device) -> Parts:
        q, made = ops.quantize(values(*shape).to(device), format, keep_master=True), {}
        for step in range(1 if is_large else 3):
            q.add_(values(*shape, seed=step + 2).to(device))
            ops.flush([q])
            made |= {f"{name} of step {step}": part for name, part in planes(q).items()}
        return made

    def timed(device) -> Timed:
        q = ops.quantize(values(*shape).to(device), format, keep_master=True)
        return Timed(lambda: ops.flush([q]), _image_bytes(q) + 4 * q.numel(), lambda: q.mul_(1.0))

    return Case("update, flush", format, shape, parts, timed if is_large else None)


def _adamw(format: str, shape) -> Case:
    """One fused step. All of its arithmetic but one division is exact: other orders have the same bits."""
    largest = 2.625 if info_of(format).code_bits == 4 else 3.5  # scales of fp32 are powers of two

    def parts(device) -> Parts:
        made = {}
        for keep_master in (False, True)[: 1 if info_of(format).stochastic_rounding else 2]:
            q = ops.quantize(short(*shape, largest=largest).to(device), format, keep_master=keep_master)
            if "rounding" in TensorState(q).scaling_state():
                TensorState(q).set_rounding_key(1234567)
            parameter = torch.nn.Parameter(q)
            parameter.grad = short(*shape, seed=1).to(device)
            torch.optim.AdamW(
                [parameter], lr=2**-6, betas=(0.5, 0.75), eps=2**-10, weight_decay=2**-3, fused=True
            ).step()
            q = parameter.detach()
            made |= {f"{name}{', master' * keep_master}": part for name, part in planes(q).items()}
            made |= {f"{name}{', master' * keep_master}": t for name, t in TensorState(q).scaling_state().items()}
        return made

    return Case("fused AdamW", format, shape, parts)


def _history(format: str, shape) -> Case:
    """Amaxes that delayed scaling collects of activations, and the scales that it makes of them."""

    def parts(device) -> Parts:
        q = ops.quantize(values(*shape).to(device), emulated(format))
        for step in range(2):
            x, grad = (values(24, n, seed=step + i).to(device) for i, n in enumerate(shape[::-1]))
            ops.linear_forward(x, q, None, False)
            ops.linear_backward(grad, q, x, False, True, True)
            ops._mark_written(q)
            ops._flush_after_step([q], [0], [True], None)
        return dict(TensorState(q).scaling_state()) | planes(q)

    return Case("delayed scaling", format, shape, parts)


# ------------------------------------------------------------------------------------ activations


def _is_packed(format: str) -> bool:
    info = info_of(format)
    return info.gemm.kind == "packed" and info.amax_history is None  # each linear has a history of its own


def used_bytes(format: str, m: int, k: int, has_square_columns: bool = True) -> tuple[int, int]:
    """How many bytes kernels write of packed codes of an (m, k) matrix, rowwise and columnwise; those of inputs may
    have square columns."""
    activations = info_of(format).activations
    pitch, padded_m, row_blocks, col_blocks = -(-k // 16) * 16, -(-m // 16) * 16, -(-m // 128), -(-k // 128)
    columns = pitch * 128 * row_blocks
    if activations.packed_rows == "tensor":
        return m * pitch + 4, columns + 4
    if activations.packed_rows == "row":
        return m * (pitch + 4), columns + 4 * pitch
    square = has_square_columns and activations.packed_input_columns == "128x128"
    scales = col_blocks * (-(-row_blocks // 4) * 4) if square else row_blocks * pitch
    return padded_m * (pitch + 4 * col_blocks), columns + 4 * scales


def _has_gradients_of_losses(format: str) -> bool:
    return _is_packed(format) and not info_of(format).gemm.folds_row_scales


def _loss(format: str, shape, is_large: bool) -> Case:
    """Cross entropy, and its gradient in codes, whose columns never have square blocks."""
    used = used_bytes(format, *shape, has_square_columns=False)

    def arguments(device):
        target = torch.arange(shape[0]) * 7 % shape[1]
        target[1::5] = -100
        logits = values(*shape, dtype=torch.bfloat16, special=not is_large and shape[0] > 1)
        return logits.to(device), target.to(device)

    options = {"grad_format": emulated(format), "rows": True, "columns": True}

    def parts(device) -> Parts:
        losses, totals, *codes = ops.cross_entropy_and_gradient(*arguments(device), label_smoothing=0.125, **options)
        made = {name: bytes[:size] for name, bytes, size in zip(("rows", "columns"), codes, used)}
        return {"losses": losses, "totals": totals} | made

    def timed(device) -> Timed:
        logits, target = arguments(device)
        return Timed(lambda: ops.cross_entropy_and_gradient(logits, target, **options), 2 * logits.nbytes + sum(used))

    return Case("cross entropy", format, shape, parts, timed if is_large else None)


def _operand(format: str, shape, is_large: bool) -> Case:
    used = used_bytes(format, *shape)

    def parts(device) -> Parts:
        made = {}
        for dtype in (torch.bfloat16, torch.float32)[: 1 if is_large else 2]:
            x = values(*shape, dtype=dtype, special=not is_large).to(device)
            codes = ops.quantize_input(x, emulated(format), True, True)
            names = f"rows, {str(dtype)[6:]}", f"columns, {str(dtype)[6:]}"
            made |= {name: bytes[:size] for name, bytes, size in zip(names, codes, used)}
        return made

    def timed(device) -> Timed:
        x = values(*shape, dtype=torch.bfloat16).to(device)
        return Timed(lambda: ops.quantize_input(x, emulated(format), True, True), x.nbytes + sum(used))

    return Case("codes of activations", format, shape, parts, timed if is_large else None)


def _transposed(hadamard: bool, shape, is_large: bool) -> Case:
    def parts(device) -> Parts:
        x = values(*shape, dtype=torch.bfloat16)
        return {"values": ops._transposed_operand(x.to(device), hadamard=hadamard)}

    def timed(device) -> Timed:
        x = values(*shape, dtype=torch.bfloat16).to(device)
        return Timed(lambda: ops._transposed_operand(x, hadamard=hadamard), 2 * x.nbytes)

    what = "transpose after Hadamard" if hadamard else "transpose"
    return Case(what, "", shape, parts, timed if is_large else None)


def _rotary(sizes, is_large: bool) -> Iterator[Case]:
    """Query, key and value of one projection; the keys and values have a quarter of the heads."""
    heads = [sizes[2], sizes[2] // 4, sizes[2] // 4]

    def inputs(device):
        angles = 20 * uniform(sizes[1], sizes[3])
        projected = values(sizes[0], sizes[1], sum(heads), sizes[3], dtype=torch.bfloat16)
        return [t.to(device) for t in (projected, angles.cos(), angles.sin())]

    def one(device) -> Parts:
        projected, cos, sin = inputs(device)
        x = projected[:, :, : heads[0]]
        return {f"interleaved {way}": ops.rotary_embedding(x, cos, sin, 1, interleaved=way) for way in (False, True)}

    def parted(device) -> Parts:
        projected, cos, sin = inputs(device)
        parts = ops.split_rotary_embedding(projected, cos, sin, heads)
        joined = ops.join_rotary_embedding(*parts, cos, sin, heads, inverse=True)
        return dict(zip(("query", "key", "value"), parts)) | {"joined": joined}

    def time_of_one(device) -> Timed:
        projected, cos, sin = inputs(device)
        return Timed(lambda: ops.rotary_embedding(projected, cos, sin, 1), 2 * projected.nbytes)

    def time_of_parted(device) -> Timed:
        projected, cos, sin = inputs(device)
        return Timed(lambda: ops.split_rotary_embedding(projected, cos, sin, heads), 2 * projected.nbytes)

    yield Case("rotary embedding", "", sizes, one, time_of_one if is_large else None)
    yield Case("rotary embedding of heads", "", sizes, parted, time_of_parted if is_large else None)


def _sums(shape, is_large: bool) -> Case:
    """Gradients of tokens, of which experts give some rows each."""

    def inputs(device):
        places = torch.randint(-1, shape[0], (4 * shape[0],), generator=torch.Generator().manual_seed(0))
        ends = torch.arange(4, len(places) + 1, 4)
        return [t.to(device) for t in (values(*shape, dtype=torch.bfloat16), places, ends)]

    def parts(device) -> Parts:
        rows, *numbers = inputs(device)
        return {"sums": ops._sum_rows(rows, *numbers), "of float32": ops._sum_rows(rows.float(), *numbers)}

    def timed(device) -> Timed:
        rows, *numbers = inputs(device)
        return Timed(lambda: ops._sum_rows(rows, *numbers), 5 * rows.nbytes + sum(n.nbytes for n in numbers))

    return Case("sums of rows", "", shape, parts, timed if is_large else None)


# --------------------------------------------------------------------------------------- messages


def _message(format: str, shape, is_large: bool) -> Iterator[Case]:
    """Tokens as tensor-parallel ranks send them. After the scales there are bytes that no kernel has to write."""
    count, columns = shape
    has_blocks = info_of(format).gemm.kind == "row_images"

    def encoded(device, is_gradient: bool):
        x = values(*shape, dtype=torch.bfloat16, special=not is_large).to(device)
        amax = ops._message_amax(x, format)
        scales = 1 if amax.numel() == 1 else count * -(-columns // 128)
        written = count * -(-columns // 16) * 16 + 4 * scales
        message = ops._encode_activation(x, format, is_gradient, amax)
        return x, amax, message, message if has_blocks else message[:written]

    for is_gradient in (False, True):

        def parts(device, is_gradient=is_gradient) -> Parts:
            x, amax, message, written = encoded(device, is_gradient)
            back = ops._decode_activations(message, format, is_gradient, list(shape), 0, x.dtype)
            known = {"amax": amax} if amax.numel() == 1 else {}
            return known | {"message": written, "values": back}

        def timed(device, is_gradient=is_gradient) -> Timed:
            x, amax, message, _ = encoded(device, is_gradient)
            return Timed(lambda: ops._encode_activation(x, format, is_gradient, amax), x.nbytes + message.nbytes)

        what = "message of a gradient" if is_gradient else "message of an activation"
        yield Case(what, format, shape, parts, timed if is_large else None)


def _gradient_message(format: str, count: int, is_large: bool) -> Iterator[Case]:
    """Weights' gradients as ranks send them, rounded to nearest and by random words."""

    def gradients(device):
        dtype = torch.bfloat16 if is_large else torch.float32
        return values(2 * count - 70, dtype=dtype, special=not is_large).to(device)

    def parts(device) -> Parts:
        given, made = gradients(device), {}
        key = torch.tensor([12345, 678, 9], dtype=torch.int32, device=device)
        for name, rounding in (("nearest", None), ("stochastic", key)):
            message = ops.quantize_gradients(given, format, 2, count, rounding=rounding, first_noise=32)
            out = torch.zeros(count, dtype=given.dtype, device=device)
            ops.sum_gradients(message[None], format, count, out, factor=0.5)
            made |= {name: message, f"sum of {name}": out}
        return made

    def timed(device) -> Timed:
        given = gradients(device)
        size = ops.quantize_gradients(given, format, 2, count).nbytes
        return Timed(lambda: ops.quantize_gradients(given, format, 2, count), given.nbytes + size)

    yield Case("message of weights' gradients", format, (2 * count - 70,), parts, timed if is_large else None)
