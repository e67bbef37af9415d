"""The arguments of an ordinary call of each operator (fuzz_arguments.py)."""

import torch

from qshard._runtime.classes import TensorState
from qshard.formats import info_of
from qshard.gradients import message_bytes

ops = torch.ops.qshard
EMPTY = ()


def baseline(draw):
    """{name: value} of an operator's arguments."""
    name = draw.schema.name.removeprefix("qshard::")
    given = OF_OPERATOR.get(name, lambda d: {})(draw)
    return {
        a.name: given[a.name] if a.name in given else of_name(draw, a)
        for a in draw.schema.arguments
    }


def of_name(draw, argument):
    """By what the argument is called, as most operators have it."""
    known = BY_NAME.get(argument.name)
    if known is not None:
        return known(draw)
    kind = str(argument.type)
    if kind.startswith("Optional["):
        return None
    plain = {"bool": draw.flag, "int": lambda: 1, "float": lambda: 1.0, "str": lambda: draw.format}
    plain["Tensor"] = lambda: draw.plain(draw.tokens, draw.columns)
    return [] if kind.startswith("List[") else plain[kind]()


BY_NAME = {
    "self": lambda d: d.quantized(),
    "input": lambda d: d.plain(d.tokens, d.columns),
    "weight": lambda d: d.quantized(),
    "grad": lambda d: d.plain(d.tokens, d.rows),
    "bias": lambda d: d.maybe(lambda: d.plain(d.rows)),
    "residual": lambda d: d.maybe(lambda: d.plain(d.tokens, d.rows)),
    "weight_grad": lambda d: d.plain(d.rows, d.columns),
    "grad_dtype": lambda d: d.maybe(lambda: torch.bfloat16),
    "dtype": lambda d: torch.float32,
    "input_is_quantized": lambda d: False,
    "norm_weight": lambda d: d.plain(d.columns),
    "norm_bias": lambda d: None,
    "eps": lambda d: 1e-5,
    "rms": lambda d: True,
    "cos": lambda d: d.plain(7, 16, dtype=torch.float32),
    "sin": lambda d: d.plain(7, 16, dtype=torch.float32),
    "dim": lambda d: 1,
    "group": lambda d: "",
    "device": lambda d: torch.device("cpu"),
    "activation": lambda d: "swiglu",
}


def dynamic(draw):
    """A plain weight, quantized within the call, half of the time."""
    if draw.flag():
        return {"format": draw.maybe(lambda: draw.format)}
    return {
        "weight": draw.plain(draw.rows, draw.columns),
        "format": draw.format,
        "weight_state": [],
    }


def backward(draw):
    """The gradient is given as values."""
    given = dynamic(draw) | dict.fromkeys(("grad_columns", "grad_size", "value_dtype", "grad_scale"))
    given |= {"needs_input": True, "needs_weight": True}
    given["input_sum"] = draw.maybe(lambda: draw.plain(draw.tokens, draw.columns))
    return given | {"weight_grad": draw.maybe(lambda: draw.plain(draw.rows, draw.columns))}


def targets(draw):
    return torch.arange(draw.tokens) % draw.rows


def head(draw):
    """A weight as of a linear."""
    given = dynamic(draw)
    given["linear_weight"] = given.pop("weight", None)
    if given["linear_weight"] is None:
        given["linear_weight"] = draw.quantized()
    given |= {"target": targets(draw), "linear_bias": draw.maybe(lambda: draw.plain(draw.rows))}
    return given | {"reduction": "mean", "label_smoothing": 0.0, "forward_precision": None}


def swiglu_backward(draw):
    inner = [draw.plain(draw.tokens, draw.columns) for _ in "gu"]
    found = {"gate": inner[0], "up": inner[1], "maxima": torch.empty(0), **dynamic(draw)}
    return found | {"grad_format": None} | activation_of(draw)


def planes(draw):
    q = draw.quantized()
    format = ops.format(q)
    given = {
        "codes": draw.place(ops.codes(q).clone()),
        "scale_inv": draw.place(ops.scale_inv(q).clone()),
    }
    if info_of(format).outer_scale:
        given["tensor_scale_inv"] = draw.place(ops.tensor_scale_inv(q).clone())
    return given | {
        "format": format,
        "columns": draw.columns,
        "row_offset": 0,
        "logical_rows": None,
        "rows_of_each": 0,
        "keep_master": False,
    }


def ranges(draw):
    """Ranges of two weights, the second one cut."""
    format = draw.rng.choice(("float8_tensorwise", "float8_blockwise", "float8_delayed[history=4]"))
    rows, columns = draw.rows, draw.columns
    start = draw.rng.randrange(rows * columns)
    values = [draw.plain(rows * columns), draw.plain(rows * columns - start)]
    numel = -(-rows // 128) * -(-columns // 128) if format == "float8_blockwise" else 1
    own, amax = [[draw.place(torch.zeros(numel)) for _ in "ab"] for _ in "ab"]
    tables = (3, 4), (3, 3)
    state = [draw.place(torch.zeros(*t)) for t in tables * 2] if "delayed" in format else []
    given = {"values": values, "formats": [format] * 2, "geometry": [rows, columns, 0, rows, columns, start]}
    given |= {"own": own, "is_known": [draw.flag(), False], "amax": amax, "state": state}
    steps = [draw.rng.choice([0, 1, 3, 5, 7]) for _ in "ab"]
    return given | {"steps": steps, "groups": [0, 0], "found_inf": draw.maybe(lambda: torch.zeros(1))}


def histories(draw):
    of_two = [draw.place(torch.zeros(3, 4)), torch.empty(0)]
    return {"amax_history": of_two, "levels": [draw.rng.randrange(3), 0], "groups": 0}


def messages(draw):
    """The message of two weights among plain values."""
    formats = [draw.rng.choice(("float8_tensorwise", "float8_blockwise")) for _ in "ab"]
    rows, columns, world = draw.rows, draw.columns, draw.rng.choice((1, 2, 3))
    numel = rows * columns
    shard = draw.plain(-(-(2 * numel + 20) // world))
    geometry = [rows, columns, 3, rows, columns, 7 + numel]
    blocks = -(-rows // 128) * -(-columns // 128)
    amax = [draw.place(torch.ones(blocks if "block" in f else 1)) for f in formats]
    given = {"shard": shard, "rank": draw.rng.randrange(world), "world": world, "formats": formats}
    given |= {"geometry": geometry, "amax": amax, "dtype": draw.dtype}
    sent = [ops._write_message(shard, r, world, formats, geometry, amax, draw.dtype) for r in range(world)]
    out = draw.plain(shard.numel() * world)
    return given | {"messages": draw.place(torch.stack(sent)), "out": out}


def gradients(draw):
    format, numel, chunks = (
        draw.rng.choice(("float8", "mxfp8", "nvfp4")),
        draw.rng.choice((1, 100, 4097)),
        2,
    )
    key = torch.tensor([1, 2, 3], dtype=torch.int32)
    given = {
        "values": draw.plain(chunks * numel - draw.rng.choice((0, 1))),
        "format": format,
        "numel": numel,
    }
    given |= {"chunks": chunks, "chunk_numel": numel, "first_noise": 16, "factor": 0.5}
    bytes_of_one = message_bytes(format, numel)
    given["messages"] = draw.bytes(chunks, 3, bytes_of_one)
    return given | {
        "rounding": draw.maybe(lambda: draw.place(key)),
        "out": draw.plain(chunks * numel),
    }


def tokens(draw):
    formats = [format for format in ops.formats() if info_of(format).code_bits == 8]
    format, is_gradient = draw.rng.choice(formats), draw.flag()
    x = draw.plain(2, draw.tokens, draw.columns)
    amax = ops._message_amax(x, format)
    message = ops._encode_activation(x, format, is_gradient, amax)
    given = {"self": x, "format": format, "is_gradient": is_gradient, "amax": draw.place(amax)}
    given["messages"] = draw.place(message.repeat(3)) if draw.flag() else message.repeat(3)
    return given | {"size": list(x.shape), "dim": draw.rng.choice((0, 1)), "dtype": draw.dtype}


def heads(draw):
    given = {"heads": [2, 1, 1], "dim": 1, "input": draw.plain(2, 5, 8, 16)}
    given |= {"query": draw.plain(2, 5, 4, 16), "key": draw.plain(2, 5, 2, 16)}
    stride = draw.maybe(lambda: [640, 128, 16, 1])
    return given | {"value": draw.plain(2, 5, 2, 16), "stride": stride}


def packed(draw, q=None):
    q = draw.quantized() if q is None else q
    data, pending, layout, format, state = TensorState(q).pack()
    given = {
        "bytes": draw.place(data),
        "pending": pending,
        "layout": list(layout),
        "format": format,
    }
    return given | {"state": list(state)} | view_of(q)


def unpacked(draw):
    q = draw.quantized()
    return packed(draw, q) | {"self": q}


def shared(draw):
    q = draw.quantized()
    master, codes, pending, layout, format, state = TensorState(q).shared_planes()
    given = {"master": master, "bytes": draw.place(codes.clone()), "pending": pending}
    given |= {
        "layout": list(layout),
        "format": format,
        "state": [draw.place(s.clone()) for s in state],
    }
    return given | view_of(q)


def view_of(q):
    geometry = {
        "size": list(q.shape),
        "stride": list(q.stride()),
        "storage_offset": q.storage_offset(),
    }
    return geometry | {"dtype": q.dtype}


def gather(draw):
    q = draw.quantized()
    image = ops._pre_all_gather(q, "").clone()
    unsharded = ops._post_all_gather(q, image, torch.float32)
    ops._pre_all_gather(q, "")
    return {"self": q, "image": draw.place(image), "unsharded": unsharded}


def activation_of(draw):
    """An activation of gate and up, or one of gate alone, which is joined with nothing."""
    if draw.flag():
        return {"activation": draw.rng.choice(("swiglu", "geglu", "sreglu"))}
    return {"activation": draw.rng.choice(("gelu", "srelu")), "up": None, "joined": False}


def mlp(draw):
    gate = draw.quantized(draw.fit(64))
    up = draw.quantized(draw.fit(64)) if draw.flag() else None
    activation = "geglu" if up is not None else draw.rng.choice(("swiglu", "gelu"))
    inner = gate.shape[0] // 2 if activation == "swiglu" else gate.shape[0]
    down = draw.quantized(draw.fit(draw.columns), inner)
    given = {
        "gate": gate,
        "up": up,
        "down": down,
        "format": draw.format,
        "down_format": draw.format,
        "activation": activation,
    }
    given |= {"residual": None, "norm_weight": draw.maybe(lambda: draw.plain(draw.columns))}
    return given | {"gate_bias": None, "up_bias": None, "down_bias": None}


def share(draw):
    given = {"self": draw.plain(draw.rows, draw.columns), "logical_rows": 4 * draw.rows}
    return given | {
        "row_offset": draw.rows,
        "rows_of_each": 0,
        "first_element": 0,
        "full_cols": draw.columns,
        "full_matrix_rows": 0,
        "groups": 0,
    }


def norm_linear(draw):
    weights = [draw.quantized(), draw.quantized()]
    return {"weights": weights, "biases": None, "format": draw.format}


def grouped(draw):
    codes, scales = (lambda *size: draw.plain(*size).to(torch.float8_e4m3fn)), draw.plain
    given = {"a": codes(32, 48), "a_scale_inv": scales(1, 32, dtype=torch.float32)}
    given |= {"b": codes(2, 16, 48), "b_scale_inv": scales(2, 1, 1, dtype=torch.float32)}
    return given | {"offs": draw.place(torch.tensor([7, 30], dtype=torch.int32)), "tile_rows": 0}


def experts(draw):
    stack = ops.quantize(torch.randn(2, 32, draw.columns, generator=draw.generator).to(draw.dtype), draw.format)
    ends = torch.tensor([1, draw.tokens], dtype=torch.int32)
    return {"weight": stack, "offs": draw.place(ends), "format": draw.maybe(lambda: draw.format)}


def experts_mlp(draw):
    def stack(*shape):
        return ops.quantize(torch.randn(*shape, generator=draw.generator).to(draw.dtype), draw.format)

    ends = torch.tensor([1, draw.tokens], dtype=torch.int32)
    joined = draw.maybe(lambda: True)
    gate, up = (stack(2, 64, draw.columns), None) if joined else [stack(2, 32, draw.columns) for _ in "gu"]
    given = {"gate": gate, "up": up, "down": stack(2, 32, 32), "offs": draw.place(ends)}
    return given | dict.fromkeys(("format", "down_format"), draw.maybe(lambda: draw.format))


def codes_backward(draw):
    """The gradient of a loss, in codes."""
    format = draw.rng.choice(("float8_tensorwise[emulate]", "float8_blockwise[emulate]"))
    logits = torch.zeros(draw.tokens, draw.rows)
    *_, rows, columns = ops.cross_entropy_and_gradient(
        logits, targets(draw), grad_format=format, rows=True, columns=True
    )
    given = {"rows": draw.place(rows), "columns": draw.place(columns), "size": list(logits.shape)}
    given |= {"weight": draw.quantized(format=format), "needs_input": True, "needs_weight": True}
    return given | {"format": None, "input_sum": None}


OF_OPERATOR = {
    "quantize": lambda d: {
        "self": d.plain(d.rows, d.columns), "logical_rows": d.maybe(lambda: 4 * d.rows),
        "row_offset": 0,
    },
    "from_planes": planes,
    "from_row_image": lambda d: {
        "image": d.place(ops.row_image(d.quantized(format="float8_1x128")).clone()), "format": "float8_1x128",
        "columns": d.columns,
    },
    "row_image": lambda d: {"self": d.quantized(format="float8_1x128")},
    "columnwise_codes": lambda d: {"self": d.quantized(32, format="mxfp8_1x32")},
    "columnwise_scale_inv": lambda d: {"self": d.quantized(32, format="mxfp8_1x32")},
    "tensor_scale_inv": lambda d: {"self": d.quantized(format="nvfp4")},
    "flush": lambda d: {"self": [d.quantized(), d.quantized().mul_(2)]},
    "Process.check_codes_can_be_read": lambda d: {"weights": [d.quantized()]},
    "linear": dynamic,
    "linear_forward": lambda d: dynamic(d) | {"save_quantized_input": False, "input_rows": None},
    "linear_backward": backward,
    "grouped_linear": experts,
    "linear_backward_accumulate": dynamic,
    "quantize_input": lambda d: {"rows": False, "columns": False},
    "_quantize_kept_input": lambda d: {"weight": None, "amax": None, "columns": False},
    "swiglu_mlp": mlp,
    "swiglu_experts": experts_mlp,
    "swiglu_linear_forward": lambda d: {
        "gate": d.plain(d.tokens, d.columns), "up": d.plain(d.tokens, d.columns), **dynamic(d), **activation_of(d),
    },
    "swiglu_linear_backward": lambda d: swiglu_backward(d) | {"weight_grad": None, "bias_grads": None},
    "swiglu_linear_backward_accumulate": swiglu_backward,
    "linear_backward_codes": codes_backward,
    "linear_backward_codes_accumulate": codes_backward,
    "norm_linear": norm_linear,
    "_norm_linear_forward": norm_linear,
    "_norm_linear_reads_codes": norm_linear,
    "linear_cross_entropy": head,
    "cross_entropy_and_gradient": lambda d: {
        "logits": d.plain(d.tokens, d.rows), "target": targets(d), "grad_format": None, "columns": False,
        "label_smoothing": 0.1,
    },
    "rotary_embedding": heads,
    "split_rotary_embedding": heads,
    "join_rotary_embedding": heads,
    "_can_normalize": lambda d: {"weight": d.plain(d.columns), "bias": None},
    "_normalize": lambda d: {"weight": d.plain(d.columns), "bias": None},
    "_quantize_normalized": lambda d: {"weight": d.plain(d.columns), "bias": None},
    "_normalize_backward": lambda d: {
        "grad": d.plain(d.tokens, d.columns), "weight": d.plain(d.columns),
        "statistics": torch.ones(1, d.tokens),
    },
    "_sum_rows": lambda d: {
        "rows": d.plain(d.tokens, d.columns), "places": torch.arange(12) - 2, "ends": torch.arange(5) * 3,
    },
    "_transposed_operand": lambda d: {"self": d.plain(d.tokens, d.columns)},
    "_grouped_gemm": grouped,
    "_quantize_for_uses": lambda d: {"weight": d.plain(d.rows, d.columns), "state": []},
    "_agree_on_ranges": ranges,
    "_agree_on_histories": histories,
    "_write_message": messages,
    "_read_messages": messages,
    "quantize_gradients": gradients,
    "sum_gradients": gradients,
    "_message_amax": tokens,
    "_encode_activation": tokens,
    "_decode_activations": tokens,
    "_plane_copy": lambda d: {"plane": "codes"},
    "_post_all_gather": gather,
    "_refresh_gathered": gather,
    "Process.number_of_groups": lambda d: {"shard": ""},
    "TensorState.set_groups": lambda d: {"groups": 0},
    "TensorState.share_tensor_scale": lambda d: {
        "self": d.quantized(format="float8_tensorwise"), "id": 5, "members": 2,
    },
    "_quantize_share": share,
    "_flush_after_step": lambda d: {
        "self": [d.quantized()], "groups": [0], "has_grad": [True],
        "found_inf": d.maybe(lambda: torch.zeros(1)),
    },
    "TensorState.set_rounding_key": lambda d: {"self": d.quantized(format="nvfp4[stochastic]"), "key": 77},
    "Watch.add": lambda d: {"weight": d.quantized(), "number": 0, "step": 1},
    "SavedTensor.over_shared_planes": shared,
    "SavedTensor.read": packed,
    "SavedTensor.read_later": packed,
    "SavedTensor.read_into": unpacked,
    "_groups_of_specs": lambda d: {"self": [d.quantized()], "specs": [1]},
    "TensorState.set_groups_of_moved": lambda d: {"moved": d.quantized()},
    "TensorState.written_by_rank": lambda d: {
        "self": [d.quantized()], "has_grad": [True], "rank": 0, "world": 1,
    },
}  # fmt: skip
