"""quantized_tensors: codes and scales of a model, one weight after the other, on any mesh."""

import math
import os
import subprocess
import sys
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from decoding import assert_same_bits, decoded
from dist_helpers import World, device, error_of, full_mesh, on_ranks, same_on_all_ranks
from models.weights import full_tensor
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import qshard
from qshard.checkpoint import quantized_tensors, ranks as ranks_module

ops = torch.ops.qshard
# (layout, recipe, options): every row of the table in docs/low-bit-checkpoints.md.
ROWS = {
    "fp8": ("deepseek-fp8", qshard.Float8BlockScaling(), {}),
    "fp8, ue8m0": ("deepseek-fp8", qshard.Float8BlockScaling(), {"scale_fmt": "ue8m0"}),
    "fp8, fp32 scales": ("deepseek-fp8", qshard.Float8BlockScaling(use_f32_scales=True), {}),
    "tensor": ("compressed-tensors", qshard.Float8CurrentScaling(), {}),
    "delayed": ("compressed-tensors", qshard.DelayedScaling(amax_history_len=3), {}),
    "channel": ("compressed-tensors", qshard.Float8RowwiseScaling(), {}),
    "mxfp8": ("compressed-tensors", qshard.MXFP8BlockScaling(), {}),
    "mxfp8 1x32": ("modelopt", qshard.MXFP8BlockScaling(weight_block=(1, 32)), {}),
    "nvfp4": ("modelopt", qshard.NVFP4BlockScaling(), {}),
    "nvfp4 1x16": ("modelopt", qshard.NVFP4BlockScaling(disable_2d_quantization=True), {}),
}
WEIGHTS = ("up.weight", "down.weight", "few.weight")


class Model(nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, a tied head and a buffer."""

    def __init__(self, dim=160, hidden=224, few=3):
        super().__init__()
        self.embed = nn.Embedding(11, dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.norm = nn.LayerNorm(dim)
        self.few = nn.Linear(dim, few, bias=False)
        self.head = nn.Linear(dim, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.linspace(0, 1, 7))

    def forward(self, ids):
        x = self.norm(self.down(self.up(self.embed(ids))))
        return self.head(x).sum() + self.few(x).sum()


def is_weight(module, name):
    return f"{name}.weight" in WEIGHTS


def build(recipe, odd=False, **kwargs):
    torch.manual_seed(0)
    model = Model(few=32 if recipe.format == "mxfp8_1x32" else 3)  # whose columns have blocks, too
    if odd:
        with torch.no_grad():
            model.up.weight[5:140, :64] = 0
            model.up.weight[3, 150] = math.inf
            model.down.weight[-1, -1] = math.nan
    model.to(device())
    return qshard.quantize_(model, recipe, filter_fn=is_weight, **kwargs)


def shard(model, mesh=None):
    mesh = full_mesh() if mesh is None else mesh
    for module in (model.up, model.down, model.few):
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def multiplied_by(model):
    """fp32 of the codes that a forward reads."""
    seen, hooks = {}, []
    for name in WEIGHTS:
        module = model.get_submodule(name.removesuffix(".weight"))

        def note(module, args, name=name):
            seen[name] = ops.dequantize(module.weight.detach(), dtype=torch.float32).clone()

        hooks.append(module.register_forward_pre_hook(note))
    model(torch.arange(11, device=device()))
    for hook in hooks:
        hook.remove()
    return seen


def of_weight(tensors, name):
    module = name.removesuffix("weight")
    return {key.removeprefix(module): t for key, t in tensors.items() if key.startswith(f"{module}weight")}


def assert_streams(model, row, want, **options):
    layout, recipe, more = ROWS[row]
    tensors = dict(quantized_tensors(model, layout=layout, **more, **options))
    for name in WEIGHTS:
        assert_same_bits(decoded(of_weight(tensors, name), recipe.format.partition("[")[0]), want[name], (row, name))
    return tensors


@on_ranks(1, 2, 4)
def test_a_stream_has_the_bits_that_forwards_multiply_by():
    rows = ROWS if dist.get_world_size() == 2 else ("fp8, ue8m0", "tensor", "mxfp8", "nvfp4 1x16")
    for row in rows:
        recipe = ROWS[row][1]
        model = shard(build(recipe, **{"mxfp8": {"keep_master": False, "stochastic_rounding": True}}.get(row, {})))
        tensors = assert_streams(model, row, multiplied_by(model), bucket_bytes=40_000)
        plain = {name: t for name, t in tensors.items() if not name.startswith(("up.w", "down", "few"))}
        assert sorted(plain) == ["embed.weight", "norm.bias", "norm.weight", "table", "up.bias"], list(plain)
        for name, tensor in plain.items():
            whole = full_tensor(getattr(value := model.state_dict()[name], "_local_tensor", value), value)
            assert torch.equal(tensor, whole if name == "table" else whole.bfloat16())
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
    same_on_all_ranks(str([(n, t.float().nan_to_num().sum().item()) for n, t in tensors.items()]), "tensors")


@on_ranks(1, 2, devices=("cpu",))
def test_zeros_infinities_and_nan_arrive_as_they_are():
    for row in ("fp8", "mxfp8", "nvfp4"):
        model = shard(build(ROWS[row][1], odd=True))
        tensors = assert_streams(model, row, multiplied_by(model), plain_dtype=None, bucket_bytes=1)
        assert tensors["up.bias"].dtype == torch.float32


@on_ranks(4)
def test_other_meshes():
    """HSDP; tensor parallelism whose cuts are on block boundaries, alone and under FSDP2."""
    whole = {row: multiplied_by(build(ROWS[row][1])) for row in ("fp8", "nvfp4")}
    for row, want in whole.items():
        model = shard(build(ROWS[row][1]), full_mesh(2, 2, names=("replicas", "shards")))
        for dst in (None, 3):
            tensors = {} if dst is None else dict(quantized_tensors(model, layout=ROWS[row][0], dst=3))
            assert len(tensors) == (0 if dst is None or dist.get_rank() != 3 else len(tensors)), dst
        assert_streams(model, row, want)
    for shape in ((1, 4), (2, 2)):
        mesh = full_mesh(*shape, names=("dp", "tp"))
        torch.manual_seed(0)
        model = nn.ModuleDict({"up": nn.Linear(128, 512, bias=False), "down": nn.Linear(512, 128, bias=False)}).to(device())
        plain = qshard.quantize_(nn.ModuleDict({k: nn.Linear(m.in_features, m.out_features, bias=False)
                                                for k, m in model.items()}).to(device()), ROWS["fp8"][1])
        with torch.no_grad():
            for name, module in model.items():
                plain[name].weight.copy_(module.weight)
        qshard.flush(plain)
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        qshard.quantize_(model, ROWS["fp8"][1], tp_mesh=mesh["tp"])
        if shape[0] > 1:
            for module in model.values():
                fully_shard(module, mesh=mesh["dp"])
        stream = quantized_tensors(model, layout="deepseek-fp8")
        assert stream.requantized == ()
        tensors = dict(stream)
        for name in ("up.weight", "down.weight"):
            want = ops.dequantize(plain.get_parameter(name).detach(), dtype=torch.float32)
            assert_same_bits(decoded(of_weight(tensors, name), "float8_blockwise"), want, (shape, name))


@on_ranks(2, devices=("cpu",))
def test_weights_that_are_cut_inside_blocks_are_named():
    mesh = full_mesh(names=("tp",))
    model = nn.ModuleDict({"up": nn.Linear(96, 200, bias=False)})
    parallelize_module(model, mesh, {"up": ColwiseParallel()})
    qshard.quantize_(model, "float8_blockwise", tp_mesh=mesh)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stream = quantized_tensors(model, layout="deepseek-fp8")
    assert stream.requantized == ("up.weight",)
    said = [w for w in caught if "quantized as a whole, and the tensors' values are not" in str(w.message)]
    assert len(said) == (dist.get_rank() == 0)
    weight = model["up"].weight
    master = full_tensor(ops.master(weight.to_local()), weight)
    want = ops.dequantize(ops.quantize(master, "float8_blockwise"))
    assert_same_bits(decoded(of_weight(dict(stream), "up.weight"), "float8_blockwise"), want)


def messages():
    """Bytes that collectives and messages of this rank carry to others, as rings and point to point do."""
    sent = []

    def all_gather(output, input, group=None, call=dist.all_gather_into_tensor):
        sent.append(input.nbytes * (dist.get_world_size(group) - 1))
        return call(output, input, group=group)

    def batch(operations, call=dist.batch_isend_irecv):
        sent.extend(op.tensor.nbytes for op in operations if op.op is dist.isend)
        return call(operations)

    patches = {"all_gather_into_tensor": all_gather, "batch_isend_irecv": batch}
    return mock.patch.multiple(dist, **patches), sent


# Rows that ranks divide, which are gathered where they stay, and rows that they do not.
SHAPES = {"even": {"a": (1024, 512), "b": (1536, 256)}, "padded": {"a": (1024, 501), "b": (1536, 333)}}


@pytest.mark.parametrize("format", ["float8_blockwise", "mxfp8", "nvfp4"])
@on_ranks(2, 4)
def test_bytes_on_the_wire(format):
    """At most a hundredth more than codes and scales, rows that pad shards included."""
    layout = "deepseek-fp8" if format == "float8_blockwise" else "modelopt"
    size, rank = dist.get_world_size(), dist.get_rank()
    for shapes in SHAPES.values():
        torch.manual_seed(0)
        model = nn.ModuleDict({name: nn.Linear(*shape) for name, shape in shapes.items()}).to(device())
        qshard.quantize_(model, format)
        for module in model.values():
            fully_shard(module)
        quantized = plain = 0  # of a rank with padded rows
        for columns, rows in shapes.values():
            per_rank = -(-rows // size)
            quantized += per_rank * columns * {"float8_blockwise": 1, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}[format]
            quantized += 4 * -(-rows // 128) * columns / 128 / size if format == "float8_blockwise" else 0
            plain += 2 * per_rank
        for dst in (None, 0):
            patched, sent = messages()
            with patched:
                stream = quantized_tensors(model, layout=layout, dst=dst, plain_dtype=torch.float16)
                assert not sent  # the schedule alone is agreed
                tensors = dict(stream)
            counted = stream.sent()
            assert counted.quantized + counted.plain == sum(sent)
            receivers = size - 1 if dst is None else int(rank != 0)
            assert counted.quantized <= 1.01 * quantized * receivers, (counted, quantized)
            assert counted.plain <= plain * receivers
            assert bool(tensors) == (dst is None or rank == 0)


GLOO_ON_A_GPU = """
import copy, torch, torch.distributed as dist, qshard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
torch.cuda.set_device(0)
dist.init_process_group("gloo")
torch.manual_seed(0)
alone = torch.nn.Sequential(torch.nn.Linear(1024, 512, bias=False)).cuda()
qshard.quantize_(alone, "float8_blockwise")
model = fully_shard(copy.deepcopy(alone), mesh=init_device_mesh("cuda", (2,)))
want, got = (dict(qshard.checkpoint.quantized_tensors(m, layout="deepseek-fp8")) for m in (alone, model))
assert want.keys() == got.keys()
for name, tensor in want.items():
    assert torch.equal(tensor.contiguous().view(torch.uint8), got[name].contiguous().view(torch.uint8)), name
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gloo_gathers_from_cuda(tmp_path):
    """Gloo's coalesced all-gather, which NCCL's ranks use, would read CUDA memory on the host."""
    script = tmp_path / "ranks.py"
    script.write_text(GLOO_ON_A_GPU)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    environment = dict(os.environ, QSHARD_LIBRARY=qshard.library_path())
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr


@on_ranks(1, 2, 4, devices=("cpu",))
def test_parts_that_are_gathered_where_they_stay_have_the_bits_of_messages():
    for row in ("fp8, ue8m0", "tensor", "mxfp8 1x32", "nvfp4"):
        model = shard(build(ROWS[row][1], odd=True))
        layout, _, options = ROWS[row]
        got = []
        for at_least in (1, 2**40):
            with mock.patch.object(ranks_module, "GATHERED_IN_PLACE", at_least):
                got.append(dict(quantized_tensors(model, layout=layout, **options)))
        in_place, in_messages = got
        assert list(in_place) == list(in_messages)
        for name, tensor in in_place.items():
            assert tensor.dtype == in_messages[name].dtype
            a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, in_messages[name]))
            assert torch.equal(a, b), name
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


@on_ranks(2)
def test_writes_of_one_rank_are_sent():
    """One rank's write is told to all in the all-reduce that begins a stream."""
    model = shard(build(ROWS["fp8"][1]))
    dict(quantized_tensors(model, layout="deepseek-fp8"))
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.up.weight.to_local().mul_(3)
    tensors = dict(quantized_tensors(model, layout="deepseek-fp8"))
    assert_same_bits(decoded(of_weight(tensors, "up.weight"), "float8_blockwise"), multiplied_by(model)["up.weight"])
    one = build(ROWS["fp8"][1]).up.weight.detach()
    assert not torch.equal(decoded(of_weight(tensors, "up.weight"), "float8_blockwise"), ops.dequantize(one))


def test_tensors_are_the_callers_own():
    model = build(ROWS["mxfp8"][1])
    before = {name: t.clone() for name, t in quantized_tensors(model, layout="compressed-tensors")}
    for name, tensor in quantized_tensors(model, layout="compressed-tensors", plain_dtype=None):
        tensor.view(torch.uint8).zero_()
    for name, tensor in quantized_tensors(model, layout="compressed-tensors"):
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name


# ------------------------------------------------------------------------------ ranks that leave


def impatient():
    """Ranks that wait for 3 s, in the place of the world's 20."""
    from datetime import timedelta

    group = dist.new_group(timeout=timedelta(seconds=3))
    return mock.patch.object(ranks_module, "_group_of", lambda *_: group)


def leaves(how):
    model = shard(build(ROWS["fp8"][1]))
    with impatient():
        stream = quantized_tensors(model, layout="deepseek-fp8", bucket_bytes=30_000)
        if dist.get_rank() == 0:
            next(stream)
            if how == "close":
                return error_of(stream.close)
            with pytest.warns(RuntimeWarning, match="left the stream before up.weight, for which"):
                del stream
            return "del"
        return error_of(dict, stream)


@pytest.mark.parametrize("how", ["close", "del"])
def test_a_consumer_that_stops_early(how):
    own, other = [o.value for o in World("cpu", 2).outcomes(leaves_and_ends, how)]
    if how == "close":
        assert own.startswith("RuntimeError: qshard.checkpoint.quantized_tensors: this rank left the stream before up.weight,")
    assert "quantized_tensors: up.weight did not come from all ranks" in other, other


def leaves_and_ends(how):
    """The barrier that ends a job waits for the rank that waits."""
    try:
        return leaves(how)
    finally:
        import time

        time.sleep(4 if dist.get_rank() == 0 else 0)


@on_ranks(2)
def test_a_block_takes_part_in_the_rest():
    model = shard(build(ROWS["fp8"][1]))
    for error in (None, ZeroDivisionError):
        taken = []

        def consume():
            with quantized_tensors(model, layout="deepseek-fp8", bucket_bytes=30_000) as stream:
                for name, _ in stream:
                    taken.append(name)
                    if dist.get_rank() == 0 and error:
                        raise error
                    if dist.get_rank() == 0:
                        break
            assert stream.sent().quantized > 0

        met = error_of(consume)
        assert met.startswith("ZeroDivisionError") if error and dist.get_rank() == 0 else met == "no error", met
        assert len(taken) == (1 if dist.get_rank() == 0 else 11)


@on_ranks(2, devices=("cpu",))
def test_what_is_refused_is_refused_on_every_rank():
    model, rank = shard(build(ROWS["fp8"][1])), dist.get_rank()

    def error(**options):
        said = error_of(quantized_tensors, model, **{"layout": "deepseek-fp8", **options})
        assert "qshard.checkpoint.quantized_tensors: " in said, said
        return said

    patched, sent = messages()
    with patched:
        assert "layout 'modelopt' has no weights of block scaling" in error(layout="modelopt")
        assert "dst is 0 on one rank and 1 on another" in error(dst=rank)
        assert "dst must be one of the model's ranks, 0, 1, not 2" in error(dst=2)
        assert "plain_dtype must be a floating-point dtype" in error(plain_dtype=torch.int8)
        assert "bucket_bytes must be a positive number" in error(bucket_bytes=0)
        assert "ranks have other tensors" in error(names=lambda name: f"{rank}.{name}")
        bad = {"names": lambda name: 3 if rank else name}
        assert "not a string (rank 1)" in error(**bad)
    assert not sent
    assert isinstance(model.up.weight, DTensor)
