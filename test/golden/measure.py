"""Computes the golden digests: each section yields pairs (case, {part: digest}). digests.py keeps
and compares them."""

import copy
import io
import pickle
import tempfile
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from canonical import bytes_of, checkpoint, digest, pickle_stream, saved_file, without_nan_bits
from inputs import largest_of, short, values

import qshard
from qshard._runtime.classes import TensorState
from qshard.formats import info_of

ops = torch.ops.qshard
VARIANTS = (
    "float8_delayed[margin=1,history=4,most_recent,e4m3]",
    "float8_blockwise[x_block_scaling_dim=1]",
    "mxfp8_1x32[phase]",
    "float8_tensorwise[stochastic]",
    "float8_delayed[history=4,stochastic]",
    "float8_blockwise[stochastic]",
    "mxfp8[stochastic]",
    "mxfp8_1x32[stochastic]",
    "nvfp4[stochastic]",
    "nvfp4_1x16[stochastic]",
)
# name: (shape, kind of values, dtype)
CASES = {
    "whole blocks": ((128, 256), "ordinary", torch.float32),
    "ragged": ((131, 47), "ordinary", torch.float32),
    "ragged bfloat16": ((131, 47), "ordinary", torch.bfloat16),
    "ragged float16": ((131, 47), "ordinary", torch.float16),
    "wide": ((3, 1100), "ordinary", torch.float32),
    "one row": ((1, 200), "ordinary", torch.float32),
    "one column": ((200, 1), "ordinary", torch.float32),
    "one element": ((1, 1), "ordinary", torch.float32),
    "no rows": ((0, 40), "ordinary", torch.float32),
    "stack of matrices": ((3, 32, 33), "ordinary", torch.float32),
    "NaN and infinity": ((131, 147), "special", torch.float32),
    "subnormal": ((131, 47), "subnormal", torch.float32),
    "all exponents": ((131, 147), "huge", torch.float32),
    "zeros": ((33, 47), "zeros", torch.float32),
}


def formats():
    return (*ops.formats(), *VARIANTS)


def fit(format, shape):
    """A shape whose matrices have a number of rows that the format can have."""
    rows = -(-shape[-2] // 32) * 32 if format.startswith("mxfp8_1x32") else shape[-2]
    return (*shape[:-2], rows, shape[-1])


def quantized(
    format, device, shape=(33, 20), keep_master=False, kind="ordinary", dtype=torch.float32
):
    made = values(*fit(format, shape), kind=kind, dtype=dtype)
    return rounding_by_key(ops.quantize(made.to(device), format, keep_master=keep_master))


def rounding_by_key(q):
    if "rounding" in TensorState(q).scaling_state():
        TensorState(q).set_rounding_key(1234567)
    return q


def codes_of(q):
    has_second = ops.format(q).startswith("mxfp8_1x32")
    return [ops.codes(q)] + ([ops.columnwise_codes(q)] if has_second else [])


def scales_of(q):
    scales = [ops.scale_inv(q)]
    if ops.format(q).startswith("mxfp8_1x32"):
        scales.append(ops.columnwise_scale_inv(q))
    return scales + ([ops.tensor_scale_inv(q)] if ops.format(q).startswith("nvfp4") else [])


def packed(q):
    """All that a tensor is, as a list of plain things."""
    q = q.detach()
    data, pending, layout, format, state = TensorState(q).pack()
    geometry = list(q.shape), list(q.stride()), q.storage_offset()
    return [data, pending, list(layout), format, state, *geometry]


def keeps_master_too(format):
    """Stochastic rounding is for tensors without a master."""
    return (False,) if "stochastic" in format else (False, True)


# ---------------------------------------------------------------------------------------- sections


def quantize(device):
    """Codes, scales, the row image as one rank sends it, and the values shown."""
    for format in ops.formats():
        for case, (shape, kind, dtype) in CASES.items():
            q = quantized(format, device, shape, kind=kind, dtype=dtype)
            parts = {
                "codes": digest(codes_of(q)),
                "scales": digest(scales_of(q)),
                "image": digest(bytes_of(ops._pre_all_gather(q, ""))),
                "values": digest(without_nan_bits(ops.dequantize(q))),
            }
            q = quantized(format, device, shape, True, kind, dtype)
            image = digest(bytes_of(ops._pre_all_gather(q, "")))
            if image != parts["image"]:  # a second row image is made of the master
                parts["image beside a master"] = image
            yield f"{format}, {case}", parts


class InBackward(torch.autograd.Function):
    """Calls a function within a backward pass."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.function()
        return grad, None


def gather_by_phase(device):
    """What one pass gathers of a format with two row images."""
    q, images = quantized("mxfp8_1x32[phase]", device, (64, 47)), {}

    def gather(name):
        images[name] = digest(bytes_of(ops._pre_all_gather(q, "")))

    gather("forward")
    one = torch.ones(1, requires_grad=True)
    InBackward.apply(one, lambda: gather("backward")).backward()
    yield "mxfp8_1x32[phase]", images


def optimizer_step(device):
    """A parameter after one step of AdamW. All of its arithmetic but one division is exact."""
    for format in formats():
        for keep_master in keeps_master_too(format):
            q = stepped(format, device, keep_master)[0].detach()
            parts = parts_of(q)
            fused = stepped(format, device, keep_master, fused=True)[0].detach()
            parts["fused"] = digest(parts_of(fused))
            yield f"{format}{', master' * keep_master}", parts


def parts_of(q):
    parts = {"codes": digest(codes_of(q)), "scales": digest(scales_of(q)), "value": digest(q + 0)}
    if state := dict(TensorState(q).scaling_state()):
        parts["state"] = digest(state)
    return parts


def stepped(format, device, keep_master=False, fused=False):
    start = short(*fit(format, (35, 20)), largest=largest_of(format)).to(device)
    q = rounding_by_key(ops.quantize(start, format, keep_master=keep_master))
    parameter = torch.nn.Parameter(q)
    optimizer = torch.optim.AdamW(
        [parameter], lr=2**-6, betas=(0.5, 0.75), eps=2**-10, weight_decay=2**-3, fused=fused
    )
    parameter.grad = short(*parameter.shape, seed=1).to(device)
    optimizer.step()
    return parameter, optimizer


def wire_of_activations(device):
    """Messages of tokens. Their last bytes, after the scales and up to a multiple of 16, are left
    out: no kernel has to write them."""
    for format in ops.formats():
        if format.startswith("nvfp4"):
            continue
        for case, kind in (("ordinary", "ordinary"), ("NaN and infinity", "special")):
            for dtype in (torch.float32, torch.bfloat16):
                x = values(5, 7, 200, kind=kind, dtype=dtype).to(device)
                yield f"{format}, {case}, {str(dtype)[6:]}", activation_messages(x, format)


def activation_messages(x, format):
    amax, parts = ops._message_amax(x, format), {}
    one_scale = amax.numel() == 1
    if one_scale:
        parts["amax"] = digest(without_nan_bits(amax))
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    scales = 1 if one_scale else rows * -(-columns // 128)
    written = rows * -(-columns // 16) * 16 + 4 * scales
    for is_gradient in (False, True):
        message = ops._encode_activation(x, format, is_gradient, amax)
        name = "gradient" if is_gradient else "input"
        parts[name] = digest(
            bytes_of(message if format.startswith("mxfp8") else message[:written])
        )
        back = ops._decode_activations(message, format, is_gradient, list(x.shape), 1, x.dtype)
        parts[f"{name} decoded"] = digest(without_nan_bits(back))
    return parts


def wire_of_gradients(device):
    for format in ("float8", "mxfp8", "nvfp4"):
        for case, kind in (("ordinary", "ordinary"), ("NaN and infinity", "special")):
            for dtype in (torch.float32, torch.bfloat16):
                gradients = values(2 * 4500 - 70, kind=kind, dtype=dtype).to(device)
                key = torch.tensor([12345, 678, 9], dtype=torch.int32, device=device)
                parts = {}
                for rounding, name in ((None, "nearest"), (key, "stochastic")):
                    messages = ops.quantize_gradients(
                        gradients, format, 2, 4500, rounding=rounding, first_noise=32
                    )
                    parts[name] = digest(messages)
                    out = torch.zeros(4500, dtype=dtype, device=device)
                    ops.sum_gradients(messages[None], format, 4500, out, factor=0.5)
                    parts[f"{name} summed"] = digest(without_nan_bits(out))
                yield f"{format}, {case}, {str(dtype)[6:]}", parts


def saved_tensors(device):
    """torch.save, pickle, what processes share, and deepcopy, of tensors and views of them."""
    for format in formats():
        for keep_master in keeps_master_too(format):
            q = quantized(format, device, keep_master=keep_master)
            yield f"{format}{', master' * keep_master}", {
                "torch.save": digest(*saved_file(q)),
                "of a view": digest(*saved_file(q[2:9])),
                "parameter": digest(*saved_file(torch.nn.Parameter(q))),
                "shared": digest(shared(q)),
                "deepcopy": digest(packed(copy.deepcopy(q))),
            }
    shard = ops.quantize(
        values(20, 47).to(device), "float8_blockwise", logical_rows=200, row_offset=40
    )
    yield "float8_blockwise, a shard to be flushed", {"torch.save": digest(*saved_file(shard))}


def shared(q):
    """What ForkingPickler hands to another process, and the tensor that it makes of that. The
    bytes that pad the scales, after the image, are left out: no kernel has to write them."""
    rebuild, arguments = ForkingPickler(io.BytesIO()).dispatch_table[type(q)](q)
    made = packed(rebuild(*arguments))
    scales = sum(s.nbytes for s in scales_of(q) if s.dtype == torch.float32)
    image = TensorState(q).storage_bytes()["image"]
    arguments = [a[: image + scales] if i == 2 else a for i, a in enumerate(arguments)]
    names = [a.__name__ if isinstance(a, type) else a for a in arguments]
    return [f"{rebuild.__module__}.{rebuild.__name__}", names, made]


def pickled_tensors(device):
    """Plain pickles hold torch's own form of a plain tensor within ours."""
    for format in ops.formats():
        q = quantized(format, device)
        yield format, {f"protocol {n}": digest(without_zip(pickle.dumps(q, n))) for n in (2, 5)}


def without_zip(data):
    """A pickle's operations, in which plain tensors are torch.save files."""
    result = []
    for name, argument in pickle_stream(data):
        if isinstance(argument, (bytes, bytearray, str)) and len(argument) > 256:
            argument = "a file of torch.save"
        result.append((name, argument))
    return result


RECIPES = {
    "tensorwise": qshard.Float8CurrentScaling(),
    "delayed": qshard.DelayedScaling(amax_history_len=4),
    "blockwise": qshard.Float8BlockScaling(),
    "mxfp8": qshard.MXFP8BlockScaling(),
    "mxfp8 1x32": qshard.MXFP8BlockScaling(weight_block=(1, 32)),
    "nvfp4": qshard.NVFP4BlockScaling(),
}


def model(recipe, device, weights="quantized", **options):
    """Two layers: torch's linear, and qshard's with a norm where weights are not plain."""
    last = torch.nn.Linear if weights == "dynamic" else qshard.nn.LayerNormLinear
    made = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), last(64, 32))
    with torch.no_grad():
        for seed, parameter in enumerate(made.parameters()):
            parameter.copy_(short(*parameter.shape, seed=seed, largest=largest_of(recipe.format)))
    torch.manual_seed(11)
    return qshard.quantize_(made.to(device), recipe, weights=weights, **options)


def saved_modules(device):
    """Bytes of the storages of whole modules; and of their state_dict all."""
    for name, recipe, options in models():
        made = model(recipe, device, **options)
        yield name, {
            "storages": digest(*saved_file(made)[1]),
            "state_dict": digest(*saved_file(made.state_dict())),
            "deepcopy": digest(*saved_file(copy.deepcopy(made))[1]),
        }


def streams_of_modules(device):
    """Pickle streams of whole modules, which hold the attributes of torch's modules."""
    for name, recipe, options in models():
        with hooks_numbered_from(1000):
            stream, _ = saved_file(model(recipe, device, **options))
        yield name, {"stream": digest(stream)}


class hooks_numbered_from:
    """Handles of hooks hold numbers that count up in a process."""

    def __init__(self, number):
        self.number = number

    def __enter__(self):
        self.kept = torch.utils.hooks.RemovableHandle.next_id
        torch.utils.hooks.RemovableHandle.next_id = self.number

    def __exit__(self, *_):
        torch.utils.hooks.RemovableHandle.next_id = self.kept


def models():
    for name, recipe in RECIPES.items():
        yield name, recipe, {}
    yield "blockwise, no master", RECIPES["blockwise"], {"keep_master": False}
    yield "nvfp4, stochastic", RECIPES["nvfp4"], {
        "keep_master": False,
        "stochastic_rounding": True,
    }
    yield "delayed, dynamic", RECIPES["delayed"], {"weights": "dynamic"}


def checkpoints(device):
    """What DCP writes of a model, and of its optimizer after a step."""
    for name, recipe, options in models():
        made = model(recipe, device, **options)
        optimizer = torch.optim.AdamW(
            made.parameters(), lr=2**-6, betas=(0.5, 0.75), eps=2**-10, weight_decay=0.0
        )
        for seed, parameter in enumerate(made.parameters()):
            parameter.grad = short(*parameter.shape, seed=seed + 50).to(device)
        optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": made.state_dict(), "optimizer": optimizer.state_dict()["state"]}
            dcp.save(state, checkpoint_id=folder, no_dist=True)
            items = checkpoint(Path(folder))
        parts = {"names": digest([item[:3] for item in items])}
        for part in state:
            parts[part] = digest([item[3] for item in items if item[0].startswith(f"{part}.")])
        yield name, parts


def linear(device):
    """Outputs and gradients. Their sums are exact, which is checked against float64. GEMMs on CUDA
    quantize their inputs, and their sums are not."""
    if device != "cpu":
        return
    for format in ops.formats():
        parts = {}
        for keep_master in (False, True):
            w = short(*fit(format, (40, 24)), largest=largest_of(format)).to(device)
            if info_of(format).gemm.folds_row_scales:
                w[:, 0] = largest_of(format)
            q = ops.quantize(w, format, keep_master=keep_master)
            for dtype in (torch.float32, torch.bfloat16):
                parameter = torch.nn.Parameter(q.clone())
                x = short(3, 5, 24, seed=1).to(dtype).to(device).requires_grad_()
                grad = short(3, 5, w.shape[0], seed=2).to(dtype).to(device)
                bias = short(w.shape[0], seed=3).to(dtype).to(device)
                y = F.linear(x, parameter, bias)
                y.backward(grad)
                results = (y, x.grad, parameter.grad)
                parts[f"{str(dtype)[6:]}{' with master' * keep_master}"] = digest(*results)
                exact = exact_linear(x, ops.dequantize(q), bias, grad)
                for result, wanted in zip(results, exact):
                    rounded = wanted.to(dtype).to(result.dtype)
                    assert torch.equal(result, rounded), f"{format}: sums are not rounded once"
        yield format, parts


def exact_linear(x, weight, bias, grad):
    x, weight, bias, grad = (t.detach().double() for t in (x, weight, bias, grad))
    flat = grad.flatten(0, -2), x.flatten(0, -2)
    return x @ weight.t() + bias, grad @ weight, flat[0].t() @ flat[1]


def operands(device):
    """Codes of activations as GEMMs on CUDA read them, without the bytes that nothing writes."""
    if device == "cpu":
        return
    for format in ops.formats():
        if not format.startswith("float8") or "delayed" in format:
            continue
        for case, kind in (("ordinary", "ordinary"), ("NaN and infinity", "special")):
            x = values(256, 384, kind=kind, dtype=torch.bfloat16).to(device)
            rows, columns = ops.quantize_input(x, format, True, True)
            counts = {"1x128": (256 * 3, 3 * 2), "row": (256, 384), "tensor": (1, 1)}
            row_scales, column_scales = counts[info_of(format).activations.packed_rows]
            yield f"{format}, {case}", {
                "rows": digest(bytes_of(rows[: 256 * 384 + 4 * row_scales])),
                "columns": digest(bytes_of(columns[: 256 * 384 + 4 * column_scales])),
            }


SECTIONS = {
    "quantize": quantize,
    "gather by phase": gather_by_phase,
    "AdamW": optimizer_step,
    "activations on the wire": wire_of_activations,
    "gradients on the wire": wire_of_gradients,
    "linear": linear,
    "operands": operands,
    "saved tensors": saved_tensors,
    "saved modules": saved_modules,
    "DCP": checkpoints,
    "pickles": pickled_tensors,
    "pickle streams of modules": streams_of_modules,
}
# What PyTorch itself writes a part of.
OF_TORCH = ("pickles", "pickle streams of modules")
