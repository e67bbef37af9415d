"""The gathered weight is the one that a single device would have quantized, bit for bit.

For every format, world size, uneven and empty shard, after initialisation and after optimizer steps,
and after a checkpoint moved to another number of ranks. One model holds a weight of every shape.
"""

import hashlib
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist_helpers import World, device, full_mesh, on_ranks, on_worlds
from helpers import has_two_images, ops
from models.formats import FORMATS, RECIPES
from models.plain_twins import flush_step
from models.weights import grid, image_bytes, local, mismatching_bytes, unsharded
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import qshard
from qshard._runtime.classes import TensorState

BUDGET_S = 120
ROWS = (1, 3, 5, 33, 100, 128, 257, 1000)
ROWS_IN_BLOCKS = (32, 96, 128, 256, 992)  # of formats that ask for whole blocks
COLS = (16, 100, 128, 384)
STEPS = 3
OPTIMIZERS = {
    "foreach": dict(foreach=True),
    "fused": dict(fused=True),
    "for-loop": dict(foreach=False),
}


def shapes_of(format):
    return list(itertools.product(ROWS_IN_BLOCKS if has_two_images(format) else ROWS, COLS))


def initial_values(format):
    """Magnitudes differ from row to row, so that every block gets a scale of its own."""
    generator = torch.Generator().manual_seed(0)
    values = []
    for rows, cols in shapes_of(format):
        scale = 2.0 ** torch.randint(-6, 7, (rows, 1), generator=generator)
        values.append((torch.randn(rows, cols, generator=generator) * scale).to(device()))
    return values


def gradients(format, step):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator).to(device()) for shape in shapes_of(format)]


class Weights(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.linears = nn.ModuleList()
        for value in values:
            linear = nn.Linear(value.shape[1], value.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(value.clone())
            self.linears.append(linear)

    @property
    def weights(self):
        return [linear.weight for linear in self.linears]


def sharded_model(format, keep_master, quantized):
    model = Weights(initial_values(format))
    if quantized == "before":
        qshard.quantize_(model, RECIPES[format], keep_master=keep_master)
    fully_shard(model, mesh=full_mesh())
    if quantized == "after":
        qshard.quantize_(model, RECIPES[format], keep_master=keep_master)
    if quantized == "after-by-operators":
        for linear in model.linears:
            linear.weight = quantized_shard(linear.weight, format, keep_master)
    return model


def quantized_shard(param, format, keep_master):
    """What a script does that has only torch.ops.load_library; the shard waits for its first flush."""
    rows, mesh = param.shape[0], param.device_mesh
    chunk = -(-rows // mesh.size())
    shard = ops.quantize(
        param.detach().to_local(),
        format,
        keep_master=keep_master,
        logical_rows=rows,
        row_offset=min(chunk * mesh.get_local_rank(), rows),
    )
    return nn.Parameter(
        DTensor.from_local(
            shard, mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )
    )


class SingleDevice:
    """The oracle: the same history on one device, in plain fp32 tensors. Without a master, what is
    left of a value after each step is what its quantization shows. `keys`: of stochastic rounding."""

    def __init__(self, format, keep_master, ranks, keys=None):
        self.format, self.keep_master = format, keep_master
        self.values = initial_values(format)
        self.weights = [
            ops.quantize(value, format, keep_master=keep_master) for value in self.values
        ]
        for weight, key in zip(self.weights, keys or ()):
            TensorState(weight).scaling_state()["rounding"].copy_(key)
        # Fused CPU kernels round the last few elements of a tensor differently from the rest: step
        # the pieces that ranks hold.
        self.pieces = [nn.Parameter(p) for value in self.values for p in value.chunk(ranks)]
        self.read_back()

    def read_back(self):
        if not self.keep_master:
            for value, weight in zip(self.values, self.weights):
                value.copy_(ops.dequantize(weight))

    def step(self, optimizer, grads):
        ranks_of = iter(self.pieces)
        for value, grad in zip(self.values, grads):
            rows = 0
            while rows < value.shape[0]:
                piece = next(ranks_of)
                piece.grad = grad[rows : rows + piece.shape[0]]
                rows += piece.shape[0]
        optimizer.step()
        for weight, value in zip(self.weights, self.values):
            weight.copy_(value)
        flush_step(self.weights)
        self.read_back()

    def mismatches(self, model):
        """(weights compared, mismatching bytes) of a model's gathered images and grids."""
        with unsharded(model):
            wrong = sum(map(mismatching_bytes, model.weights, self.weights))
        return len(self.weights), wrong

    def master_mismatches(self, model):
        """Elements of this rank's master rows that differ from the plain parameters'."""
        wrong = 0
        for weight, value in zip(model.weights, self.values):
            mine = ops.master(weight.to_local().detach())
            want = distribute_tensor(
                value, weight.device_mesh, weight.placements, src_data_rank=None
            ).to_local()
            wrong += int((mine.view(torch.int32) != want.view(torch.int32)).sum())
        return wrong


def train_both(model, oracle, optimizer):
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2, **OPTIMIZERS[optimizer])
    theirs = torch.optim.AdamW(oracle.pieces, lr=1e-2, **OPTIMIZERS[optimizer])
    for step in range(STEPS):
        grads = gradients(oracle.format, step)
        for weight, grad in zip(model.weights, grads):
            weight.grad = distribute_tensor(
                grad, weight.device_mesh, weight.placements, src_data_rank=None
            )
        ours.step()
        oracle.step(theirs, grads)


# ----------------------------------------------------------------------- init and steps


def run_history(format, keep_master, quantized, optimizer):
    model = sharded_model(format, keep_master, quantized)
    oracle = SingleDevice(format, keep_master, dist.get_world_size())
    counts = [oracle.mismatches(model)]
    train_both(model, oracle, optimizer)
    counts.append(oracle.mismatches(model))
    return {
        "cases": sum(cases for cases, _ in counts),
        "mismatching bytes": sum(wrong for _, wrong in counts),
        "mismatching masters": oracle.master_mismatches(model) if keep_master else 0,
        "pending bytes": sum(
            TensorState(local(p)).storage_bytes()["pending"] for p in model.parameters()
        ),
    }


@pytest.mark.each_value
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("quantized", ["before", "after", "after-by-operators"])
@on_worlds(1, 2, 3, 4)
def test_gathered_weights_equal_single_device_quantization(
    world, quantized, format, optimizer, report
):
    total = 0
    for keep_master in (True, False):
        by_rank = world.run(run_history, format, keep_master, quantized, optimizer)
        total += by_rank[0]["cases"]
        for counts in by_rank:
            counts.pop("cases")
            assert not any(counts.values()), (keep_master, counts)
    report.append(
        f"mesh invariance {world} {format} {quantized} {optimizer}: {total} cases, 0 mismatching bytes"
    )


def stochastic_model(recipe):
    model = Weights(initial_values(recipe))
    qshard.quantize_(model, RECIPES[recipe], keep_master=False, stochastic_rounding=True)
    return fully_shard(model, mesh=full_mesh())


def run_stochastic(recipe):
    """Mismatches after some steps that round by each parameter's own key."""
    torch.manual_seed(7)
    model = stochastic_model(recipe)
    shards = [local(w).detach() for w in model.weights]
    keys = [TensorState(shard).scaling_state()["rounding"].clone() for shard in shards]
    assert len({tuple(key.tolist()) for key in keys}) == len(keys)  # one per parameter
    oracle = SingleDevice(ops.format(shards[0]), False, dist.get_world_size(), keys)
    train_both(model, oracle, "foreach")
    assert all(TensorState(shard).scaling_state()["rounding"][2] == STEPS for shard in shards)
    return oracle.mismatches(model)


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", FORMATS)
@on_worlds(1, 3, 4)
def test_stochastic_rounding_does_not_depend_on_the_mesh(world, recipe, report):
    for cases, wrong in world.run(run_stochastic, recipe):
        assert wrong == 0
    report.append(f"stochastic rounding {world} {recipe}: {cases} weights, 0 mismatching bytes")


# ----------------------------------------------------------------------- HSDP


@pytest.mark.each_value
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)], ids=str)
@on_ranks(4)
def test_gathered_weights_of_hsdp_equal_single_device_quantization(shape, format, keep_master):
    model = Weights(initial_values(format))
    qshard.quantize_(model, RECIPES[format], keep_master=keep_master)
    fully_shard(model, mesh=full_mesh(*shape, names=("replicate", "shard")))
    oracle = SingleDevice(format, keep_master, shape[1])
    counts = [oracle.mismatches(model)]
    train_both(model, oracle, "fused")
    counts.append(oracle.mismatches(model))
    assert counts == [(len(shapes_of(format)), 0)] * 2


# ----------------------------------------------------------------------- checkpoints


def save_after_steps(folder, format, keep_master):
    model = sharded_model(format, keep_master, "before")
    oracle = SingleDevice(format, keep_master, 1)
    train_both(model, oracle, "foreach")
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        planes = [(image_bytes(w).clone(), grid(w).clone()) for w in oracle.weights]
        torch.save(planes, f"{folder}/oracle")


def load_and_compare(folder, format, keep_master):
    """(mismatching bytes against the oracle, elements of other value, digest of all images)."""
    model = sharded_model(format, keep_master, "before")
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    wrong_bytes, wrong_values, digest = 0, 0, hashlib.sha256()
    with unsharded(model):
        for weight, (image, scales) in zip(model.weights, torch.load(f"{folder}/oracle")):
            want = quantized_from(weight, image.to(device()), scales.to(device()))
            wrong_bytes += mismatching_bytes(weight, want)
            wrong_values += int((ops.dequantize(weight) != ops.dequantize(want)).sum())
            for part in (image_bytes(weight)[: image.numel()], grid(weight)):
                digest.update(part.cpu().clone().view(torch.uint8).numpy().tobytes())
    return wrong_bytes, wrong_values, digest.hexdigest()


def quantized_from(like, image, scales):
    """A whole quantized tensor of the given bytes."""
    tensor = ops.quantize(torch.zeros(like.shape, device=device()), ops.format(like))
    image_bytes(tensor).copy_(image)
    grid(tensor).copy_(scales)
    return tensor


@pytest.mark.each_value
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("format", FORMATS)
@on_worlds(4, 2)
def test_resume_on_other_world_sizes(world, format, keep_master, tmp_path):
    """With a master bit for bit. Without, the same values, and the same bytes on any world size."""
    world.run(save_after_steps, str(tmp_path), format, keep_master)
    digests = set()
    for size in range(1, world.size + 1):
        for wrong_bytes, wrong_values, digest in World(world.device, size).run(
            load_and_compare, str(tmp_path), format, keep_master
        ):
            assert wrong_values == 0, size
            assert wrong_bytes == 0 or not keep_master, size
            digests.add(digest)
    assert len(digests) == 1
