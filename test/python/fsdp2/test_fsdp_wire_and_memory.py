"""What FSDP2 sends and what a rank holds, in absolute bytes.

Expected numbers are computed here from shapes alone: one uint8 input per quantized parameter of
padded rows x padded row, one packed storage [image | master | grid] per shard.
"""

import gc
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from collective_calls import collectives, count, gathers
from dist_helpers import device, full_mesh, on_ranks, on_worlds
from helpers import ceil_div, grid_bytes, ops, round_up, row_bytes
from models.formats import FORMATS, MIXES
from models.fsdp2 import build, build_oracle
from models.training import adamw, batch, loss_of, train
from models.weights import local, quantized_parameters, unsharded
from torch.distributed.tensor import DTensor

from qshard._runtime.classes import TensorState

BUDGET_S = 60
ROWS = (257, 5, 1, 256)


@dataclass(frozen=True)
class Expected:
    """Bytes of one quantized fp32 parameter on `ranks` ranks."""

    format: str
    rows: int
    cols: int
    ranks: int

    @property
    def padded_rows(self):
        return ceil_div(self.rows, self.ranks)

    @property
    def image(self):
        return self.padded_rows * row_bytes(self.format, self.cols)

    @property
    def gathered(self):
        return self.ranks * self.image

    @property
    def value(self):
        """A master, or an update that waits to be quantized."""
        return self.padded_rows * self.cols * 4

    @property
    def grid(self):
        return grid_bytes(self.format, self.rows, self.cols)

    def storage(self, keep_master):
        codes = sum(round_up(plane, 16) for plane in (self.image, self.grid))
        return codes + (self.value if keep_master else 0)


def expected_of(param, ranks):
    return Expected(ops.format(local(param)), *param.shape, ranks)


def check_planes(model, keep_master, pending=False):
    """Asserts the exact size of every plane of every shard."""
    ranks = dist.get_world_size()
    for name, param in quantized_parameters(model).items():
        shard, want = local(param), expected_of(param, ranks)
        has = TensorState(shard).storage_bytes()
        assert has["image"] == want.image, name
        assert has["master"] == (want.value if keep_master else 0), name
        assert has["grid"] == want.grid, name
        assert has["pending"] == (want.value if pending else 0), name
        assert has["storage"] == want.storage(keep_master), name
        assert has["grid_snapshot"] in (0, want.grid), name
        if not pending:
            assert shard.untyped_storage().nbytes() == (
                has["master"] if keep_master else want.storage(keep_master)
            ), name


# ----------------------------------------------------------------------------------- wire


@pytest.mark.pairwise
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("format", MIXES)
@pytest.mark.parametrize("rows", ROWS)
@on_ranks(1, 2, 4)
def test_one_uint8_input_per_parameter(format, keep_master, rows):
    model = build(format, keep_master=keep_master, rows=rows)
    mesh = full_mesh()
    for name, param in quantized_parameters(model).items():
        shard = local(param)
        (image,), _ = shard.fsdp_pre_all_gather(mesh)
        assert image.dtype == torch.uint8, name
        assert image.nbytes == expected_of(param, mesh.size()).image, name
        # Zero copy, and the padded image, not the rows of this shard.
        (again,), _ = shard.fsdp_pre_all_gather(mesh)
        assert image.data_ptr() == again.data_ptr(), name
        assert image.untyped_storage()._cdata == again.untyped_storage()._cdata, name
        if not keep_master:
            assert image.data_ptr() == shard.untyped_storage().data_ptr(), name


def group_bytes(module, ranks):
    """What one rank puts into the all-gather of the parameters that FSDP2 groups under `module`."""
    total = 0
    for param in module.parameters():
        if ops.is_quantized(local(param)):
            total += expected_of(param, ranks).image
        else:
            total += ceil_div(param.shape[0], ranks) * param.shape[1:].numel() * 4
    return total


def collectives_of_a_step(model):
    """(all-gather inputs as (dtype, bytes), other collectives) of the second training step."""
    optimizer = adamw(model)
    train(model, optimizer, steps=1)
    with gathers(lambda input: (input.dtype, input.nbytes)) as inputs, collectives() as calls:
        train(model, optimizer, steps=1, first_step=1)
    # What the process groups saw is what FSDP2 asked for.
    on_wire = [sizes[:2] for name, sizes in calls if "allgather" in name]
    ranks = dist.get_world_size()
    sent = [bytes // dtype.itemsize for dtype, bytes in inputs]
    assert on_wire == [[[ranks * n], [n]] for n in sent]
    return inputs, [(name, sizes) for name, sizes in calls if "allgather" not in name]


def run_counted(format, keep_master, rows, reshard):
    """Checks every collective of one training step; returns the bytes this rank gathered."""
    model = build(format, keep_master=keep_master, rows=rows, reshard_after_forward=reshard)
    oracle = build_oracle(format, rows=rows, reshard_after_forward=reshard)
    ranks = dist.get_world_size()
    gathered, others = collectives_of_a_step(model)
    plain_gathered, plain_others = collectives_of_a_step(oracle)

    # FSDP2 gathers the same groups in the same order; ours are smaller by what the arithmetic says.
    size_of_plain = {
        group_bytes(plain, ranks): group_bytes(ours, ranks)
        for plain, ours in ((oracle.blocks[0], model.blocks[0]), (oracle.head, model.head))
    }
    assert gathered == [(torch.uint8, size_of_plain[bytes]) for _, bytes in plain_gathered]
    # Besides, one all-reduce of amaxes per step.
    assert count(others, "allreduce") == (1 if ranks > 1 else 0)
    assert [call for call in others if call[0] != "allreduce"] == plain_others
    return sum(bytes for _, bytes in gathered), sum(bytes for _, bytes in plain_gathered)


@pytest.mark.each_value
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", ROWS)
@on_worlds(2, 4)
def test_collectives_of_a_step(world, format, keep_master, rows, reshard, report):
    sent = world.run(run_counted, format, keep_master, rows, reshard)
    assert len(set(sent)) == 1
    ours, plain = sent[0]
    if rows == 257 and keep_master:
        report.append(
            f"wire {world} {format} rows={rows} {'reshard' if reshard else 'keep gathered'}: "
            f"{ours:,} B sent per rank and step, plain fp32 FSDP2 {plain:,} B"
        )


# --------------------------------------------------------------------------------- memory


def live_bytes(at_most=None):
    """Bytes of all storages on this rank's device that Python can reach. gloo's threads let go of a
    finished collective's tensors a moment later: looks again while there is more than expected, or,
    without an expectation, until the number stands still."""
    last = None
    for _ in range(10):
        gc.collect()
        storages = {}
        for thing in gc.get_objects():
            if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device == device():
                storage = thing.untyped_storage()
                has_master = ops.is_quantized(thing) and ops.master(thing) is not None
                nbytes = TensorState(thing).storage_bytes()["storage"] if has_master else storage.nbytes()
                storages[storage._cdata] = max(nbytes, storages.get(storage._cdata, 0))
        total = sum(storages.values())
        if total == last if at_most is None else total <= at_most:
            break
        last = total
        time.sleep(0.02)
    return total


@pytest.mark.pairwise
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("format", MIXES)
@pytest.mark.parametrize("rows", [257, 5])
@on_ranks(1, 2, 4)
def test_memory_while_unsharded(format, keep_master, rows, reshard):
    ranks = dist.get_world_size()
    model = build(format, keep_master=keep_master, rows=rows, reshard_after_forward=reshard)
    check_planes(model, keep_master)
    train(model, steps=1)
    check_planes(model, keep_master)

    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    before = live_bytes()
    gathered = plain = 0
    weights = []
    with unsharded(model):
        for name, weight in model.named_parameters():
            storage = weight.untyped_storage().nbytes()
            if ops.is_quantized(weight):
                want = expected_of(weight, ranks)
                assert storage == want.gathered, name
                has = TensorState(weight).storage_bytes()
                assert has["master"] == has["pending"] == 0 and has["grid"] == want.grid, name
                gathered += want.gathered
            else:
                plain += storage
            assert not isinstance(weight, DTensor)
            weights.append(weight)
        # Grids are snapshots: at most one more per parameter.
        grids = sum(TensorState(w).storage_bytes()["grid"] for w in weights if ops.is_quantized(w))
        held = live_bytes(at_most=before + gathered + plain + grids) - before
        assert gathered + plain <= held <= gathered + plain + grids, (held, gathered, plain, grids)
    for weight in weights:
        assert weight.untyped_storage().nbytes() == 0
    assert live_bytes(at_most=before + grids) - before <= grids
    check_planes(model, keep_master)


@pytest.mark.pairwise
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("format", MIXES)
@on_ranks(1, 2, 4)
def test_memory_across_a_step(format, keep_master):
    model = build(format, keep_master=keep_master)
    looks = []

    def look(*_):
        # An optimizer's own post hooks run before the global one that flushes.
        check_planes(model, keep_master, pending=not keep_master)
        looks.append(True)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(look)
    for step in range(2):
        loss_of(model, batch(step)).backward()
        check_planes(model, keep_master)
        optimizer.step()
        check_planes(model, keep_master)
        optimizer.zero_grad()
    assert len(looks) == 2

    with torch.no_grad():
        for param in quantized_parameters(model).values():
            param.mul_(2)
    check_planes(model, keep_master, pending=not keep_master)
    with unsharded(model):
        pass
    check_planes(model, keep_master)
