"""What random programs look at: values of plain and quantized tensors, and how they differ."""

from dist_helpers import device
from helpers import has_two_images, is_quantized, ops, value
from models.weights import local, mismatching_bytes
from program_meshes import own_part, part_count
from torch.distributed.tensor import DTensor

from qshard._runtime.classes import TensorState


def state_of(tensor):
    """Copies of what a quantized tensor remembers from step to step (delayed scaling)."""
    return {name: t.clone() for name, t in TensorState(tensor.detach()).scaling_state().items()}


def quantized_with(values, format, state, keep_master):
    """A whole value quantized on one device, by the given state where a format has one."""
    whole = ops.quantize(values, format, keep_master=keep_master and has_two_images(format))
    for name, tensor in TensorState(whole).scaling_state().items():
        tensor.copy_(state[name])
    return whole.copy_(values) if state else whole


def difference(actual, expected):
    """What is different between two plain tensors, or None; NaNs are alike."""
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return (
            f"{actual.dtype} of shape {tuple(actual.shape)}, expected {expected.dtype} of shape "
            f"{tuple(expected.shape)}"
        )
    same = (actual == expected) & (actual.signbit() == expected.signbit())
    same |= actual.isnan() & expected.isnan()
    if same.all():
        return None
    where = (~same).nonzero()[0].tolist()
    got, want = actual[tuple(where)].item(), expected[tuple(where)].item()
    return f"{(~same).sum()} of {same.numel()} values differ, first at {where}: {got}, expected {want}"


def has_pending(tensor):
    return TensorState(tensor).storage_bytes()["pending"] > 0


def implausible(shown, values):
    """What is wrong with `shown` as codes of `values`, whatever other rows share their scales; or None.
    Zero is a code of every format: rounding, and clipping too, is off by the value itself at most."""
    bad = ((shown.double() - values.double()).abs() > values.double().abs()) & values.isfinite()
    if not bad.any():
        return None
    where = tuple(bad.nonzero()[0].tolist())
    got, want = shown[where].item(), values[where].item()
    return f"{bad.sum()} of {bad.numel()} codes are far off, first at {where}: {got} for {want}"


def quantized_like(values, tensor):
    """What a flush of `tensor` makes of the whole `values`, as a matrix."""
    format, keep_master = ops.format(tensor), TensorState(tensor).keeps_master()
    matrix = values.reshape(-1, values.shape[-1]).contiguous()
    return quantized_with(matrix, format, state_of(tensor), keep_master)


def rounded_like(values, tensor):
    """What a flush of `tensor` leaves of the whole `values`, or its codes show of them."""
    if values.numel() == 0:
        return values
    return ops.dequantize(quantized_like(values, tensor), dtype=values.dtype).view(values.shape)


def whole_buffer(tensor):
    """The matrix that a quantized tensor is a window of, or None where other rows share its scales."""
    rows, cols, logical_rows, *_ = TensorState(tensor).pack()[2]
    return tensor.as_strided((rows, cols), (cols, 1), 0) if rows == logical_rows else None


def shares_no_scales(tensor):
    """Whether a quantized tensor is all of one matrix."""
    matrix = whole_buffer(tensor)
    return matrix is not None and matrix.shape == tensor.shape and tensor.is_contiguous()


def whole(param):
    """The whole value of a plain parameter."""
    param = param.detach()
    return param.to(device()).full_tensor() if isinstance(param, DTensor) else param


def local_rows(values, param):
    """The rows of this rank among those of a whole value, on the parameter's device."""
    if not isinstance(param, DTensor):
        return values
    chunk = -(-values.shape[0] // part_count())
    rows = local(param).shape[0]
    first = min(chunk * own_part(), values.shape[0])
    return values[first : first + rows].to(local(param).device)


def check_gathered(ours, twin):
    """I2: every gathered weight is the quantization of the twin's whole value. Returns what is not."""
    for module in ours.fsdp_modules():
        module.unshard()
    weights = {
        i: ours.model.layers[i].weight.detach()
        for i, layer in enumerate(ours.setup.layers)
        if layer.format
    }
    shown = {i: ops.dequantize(w) for i, w in weights.items() if is_quantized(w)}  # may flush
    twin.catch_up()
    for module in twin.fsdp_modules():
        module.unshard()  # it may have been gathered before, as ours, and show an older value
    wrong = []
    for i, gathered in weights.items():
        plain, name = twin.model.layers[i], f"layers.{i}.weight, gathered"
        if i not in shown:
            wrong.append(f"{name}, is plain")
            continue
        # Without a master values are made from codes. Quantized again they would have other bytes
        # where a block's largest code had been rounded up to 224 * 2^k.
        if plain.layer.keep_master:
            count = mismatching_bytes(gathered, plain.quantized(plain.weight))
            if count:
                wrong.append(f"{name}: {count} bytes differ")
        text = difference(shown[i], plain.shown(plain.weight))
        if text:
            wrong.append(f"{name}: {text}")
    for module in ours.fsdp_modules() + twin.fsdp_modules():
        module.reshard()
    return "; ".join(wrong) or None


def plain_value(tensor):
    return value(tensor).contiguous()
