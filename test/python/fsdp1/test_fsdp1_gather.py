"""FSDP1's gather of codes: what arrives, what it costs, and that it trains as FSDP2 trains quantized
parameters, bit for bit."""

import pytest
import torch
import torch.distributed as dist
from collective_calls import collectives, count
from dist_helpers import device, on_ranks, on_worlds
from models.blocks import Block, Model
from models.formats import DELAYED, quantize_model
from models.fsdp1 import (
    BF16,
    BF16_POLICY,
    SENT_AS_CODES,
    build_fsdp1,
    build_fsdp2,
    check_as,
    check_gathers,
    different_values,
    gathered_bytes,
    make_dynamic,
    train_fsdp1,
    wrap,
)
from models.fsdp2 import shard
from models.training import adamw, batch, loss_of, train
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel as FSDP, StateDictType

import qshard
from qshard import module_state

BUDGET_S = 45

# ---------------------------------------------------------------------- the gather of codes


def run_gather(format, rows, **kwargs):
    model = build_fsdp1(format, rows=rows, mixed_precision=BF16, **kwargs)
    checked = [check_gathers(model)]
    loss_of(model, batch(0)).backward()
    optimizer = adamw(model)
    optimizer.step()
    return [*checked, check_gathers(model)]


@pytest.mark.pairwise
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("rows", [3, 33, 257])
@pytest.mark.parametrize("format", SENT_AS_CODES)
@on_worlds(2, 3, 4)
def test_gathered_values_are_those_of_the_whole_weight(world, format, rows, use_orig_params):
    """Shards end within rows and blocks, and some ranks have nothing of a weight."""
    results = world.run(run_gather, format, rows, use_orig_params=use_orig_params)
    assert results == [[5, 5]] * world.size


def run_as_fsdp2(format, train_as, recompute=None, **kwargs):
    model = build_fsdp1(format, mixed_precision=BF16, recompute=recompute, **kwargs)
    strategy = kwargs.get("strategy", "")
    twin = build_fsdp2(format, mp_policy=BF16_POLICY, recompute=recompute, strategy=strategy)
    losses, others = train_fsdp1(model, **train_as), train(twin, **train_as)
    return losses == others, different_values(model, twin)


GATHER_MODES = {
    "plain": {},
    "accumulate": dict(train_as=dict(microbatches=2)),
    "recompute": dict(recompute=False),
    "recompute-reentrant": dict(recompute=True),
}


@pytest.mark.each_value
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("format", SENT_AS_CODES)
@pytest.mark.parametrize("mode", GATHER_MODES)
@on_worlds(2)
def test_gather_of_codes_trains_as_fsdp2(world, mode, format, strategy, use_orig_params):
    """On two ranks, whose sums have one order."""
    kwargs = {"train_as": {}} | GATHER_MODES[mode]
    results = world.run(
        run_as_fsdp2, format, strategy=strategy, use_orig_params=use_orig_params, **kwargs
    )
    assert results == [(True, [])] * 2


@pytest.mark.parametrize("format", SENT_AS_CODES)
@on_ranks(2, devices=("cuda",))
def test_offloaded_shards_are_gathered_as_codes(format):
    """FSDP1 pins what it offloads, which takes a GPU."""
    model = build_fsdp1(format, mixed_precision=BF16, cpu_offload=CPUOffload(True))
    losses = train_fsdp1(model)
    assert losses[-1] < losses[0]
    assert check_gathers(model) == 5


@pytest.mark.parametrize("format", SENT_AS_CODES)
@on_worlds(4)
def test_hybrid_gather_of_codes_trains_as_hsdp(world, format):
    results = world.run(run_as_fsdp2, format, {}, strategy="HYBRID_SHARD")
    assert results == [(True, [])] * 4


# ------------------------------------------------------------------------------- on the wire


def run_wire(format, gather):
    model = build_fsdp1(format, mixed_precision=BF16, gather=gather)
    train_fsdp1(model, steps=1)
    with gathered_bytes() as sent:
        loss_of(model, batch(0)).backward()
    units = module_state.of(model).fsdp1.units
    plain = [2 * unit.shard_numel for unit in units]
    expected = [
        unit.message_bytes(torch.bfloat16) if unit.gathers_codes else nbytes
        for unit, nbytes in zip(units, plain)
    ]
    codes = [sum(w.place.numel for w in unit.weights if w.sends_codes) for unit in units]
    numels = [unit.shard_numel * dist.get_world_size() for unit in units]
    # The root is gathered once, blocks in forward and in backward.
    assert sorted(sent) == sorted([*(-(-n // 16) * 16 for n in [*expected, *expected[1:]])])
    with collectives() as calls:
        optimizer = adamw(model)
        optimizer.step()
    return sum(sent) * dist.get_world_size(), codes, numels, count(calls, "allreduce")


@pytest.mark.parametrize("format", SENT_AS_CODES)
@on_ranks(2)
def test_a_byte_per_element_and_one_all_reduce_a_step(format):
    sent, codes, numels, reduces = run_wire(format, "quantized")
    passes = [1, 2, 2]
    least = sum(n * (c + 2 * (k - c)) for n, c, k in zip(passes, codes, numels))
    # Messages are of one size; alignment and biases at the end of a unit make the difference.
    assert least <= sent <= 1.03 * least
    assert sent < 0.53 * sum(2 * n * k for n, k in zip(passes, numels))
    assert reduces == 1


@on_ranks(2)
def test_param_dtype_gathers_as_without_qshard():
    model = build_fsdp1("float8_blockwise", mixed_precision=BF16, gather="param_dtype")
    train_fsdp1(model, steps=1)
    with gathered_bytes() as sent:
        loss_of(model, batch(0)).backward()
    units = module_state.of(model).fsdp1.units
    with collectives() as calls:
        adamw(model).step()
    numels = [unit.shard_numel * dist.get_world_size() for unit in units]
    codes = [len(unit.weights) for unit in units]
    assert codes == [0, 0, 0] and count(calls, "allreduce") == 0
    assert sum(sent) * dist.get_world_size() == sum(2 * n * k for n, k in zip([1, 2, 2], numels))


@on_ranks(2, devices=("cpu",))
def test_peak_bytes_of_a_gather():
    """Allocations of a gather: the message and what is received, beside FSDP1's own."""
    model = build_fsdp1("float8_blockwise", mixed_precision=BF16)
    train_fsdp1(model, steps=1)
    unit = module_state.of(model).fsdp1.units[1]
    out = torch.empty(unit.shard_numel * dist.get_world_size(), dtype=torch.bfloat16)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(profile_memory=True, activities=cpu) as p:
        unit.all_gather(unit.handle, out)
    level = peak = 0
    for event in p.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    message = unit.message_bytes(torch.bfloat16)
    # One is sent, two are received, and gloo receives them in memory of its own first.
    assert 3 * message <= peak <= 5.01 * message


# ------------------------------------------------------------------- which weights there are


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(257, 100)
        self.block = Block(64)
        self.head = nn.Linear(100, 257, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.block(self.embedding(tokens)))


def train_on_tokens(model):
    optimizer, losses = adamw(model), []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        tokens = torch.randint(257, (32,), generator=generator).to(device())
        loss = nn.functional.cross_entropy(model(tokens).float(), tokens.roll(1))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.pairwise
@pytest.mark.parametrize("after", [False, True], ids=["before-wrapping", "after-wrapping"])
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("format", SENT_AS_CODES)
@on_ranks(2)
def test_a_tied_embedding_is_gathered_and_trains_alike(format, use_orig_params, after):
    torch.manual_seed(0)
    model = Tied().to(device())
    kwargs = dict(use_orig_params=use_orig_params, mixed_precision=BF16)
    model = make_dynamic(wrap(model, **kwargs), format) if after else wrap(
        make_dynamic(model, format), **kwargs
    )
    qshard.prepare_for_fsdp1(model)
    assert check_gathers(model) == 3
    torch.manual_seed(0)
    twin = shard(quantize_model(Tied().to(device()), format), mp_policy=BF16_POLICY)
    # On GPUs the GEMM of quantized parameters adds to the embedding's gradient, and rounds once.
    is_exact = device().type == "cpu"
    check_as(train_on_tokens(model), train_on_tokens(twin), model, twin, is_exact)


@on_ranks(2)
def test_plain_and_quantized_weights_in_one_unit():
    """Formats and plain weights in one unit, and a filter."""
    torch.manual_seed(0)
    model = Model().to(device())
    recipe = qshard.Float8BlockScaling()
    qshard.quantize_(
        model, recipe, weights="dynamic", filter_fn=lambda _, name: name.endswith("up")
    )
    model = qshard.prepare_for_fsdp1(wrap(model, mixed_precision=BF16))
    assert check_gathers(model) == 2
    torch.manual_seed(0)
    twin = Model().to(device())
    qshard.quantize_(twin, recipe, filter_fn=lambda _, name: name.endswith("up"))
    shard(twin, mp_policy=BF16_POLICY)
    assert train_fsdp1(model) == train(twin)
    assert not different_values(model, twin)


# -------------------------------------------------------------- what is done to modules afterwards


@pytest.mark.each_value
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("second", [*SENT_AS_CODES, "mxfp8", None])
@pytest.mark.parametrize("first", [*SENT_AS_CODES, "mxfp8"])
@on_ranks(2)
def test_the_gather_follows_the_modules(first, second, use_orig_params):
    """What is gathered is of the format that the modules have; None: plain."""
    kwargs = dict(use_orig_params=use_orig_params, mixed_precision=BF16)
    model = build_fsdp1(first, **kwargs)
    train_fsdp1(model, steps=1)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        values = {n: v for n, v in model.state_dict().items() if "amax" not in n}
    if second is None:
        qshard.dequantize_(model)
        twin = wrap(Model().to(device()), **kwargs)
    else:
        make_dynamic(model, second)
        twin = wrap(make_dynamic(Model().to(device()), second), **kwargs)
    with FSDP.state_dict_type(twin, StateDictType.FULL_STATE_DICT):
        twin.load_state_dict(values, strict=False)
    if second is not None:
        qshard.prepare_for_fsdp1(twin)
    rows = [[r.gathered for r in qshard.report(m)] for m in (model, twin)]
    with gathered_bytes() as sent:
        losses = train_fsdp1(model)
    with gathered_bytes() as wanted:
        assert losses == train_fsdp1(twin)
    assert not different_values(model, twin)
    assert sent == wanted and rows[0] == rows[1]
    if second is not None:
        assert check_gathers(model) == check_gathers(twin)


@pytest.mark.parametrize("root_is_first", [True, False])
@on_ranks(2)
def test_a_model_and_a_part_of_it_are_prepared(root_is_first):
    """A unit belongs to one preparation, the latest."""
    model = build_fsdp1(DELAYED, mixed_precision=BF16)
    twin = build_fsdp1(DELAYED, mixed_precision=BF16)
    child = model.module.blocks[0]
    qshard.prepare_for_fsdp1(child)
    if not root_is_first:
        qshard.prepare_for_fsdp1(model)
    assert train_fsdp1(model) == train_fsdp1(twin)
    assert not different_values(model, twin)
    tables = [
        [t for _, dynamic in module_state.dynamics_of(m) for t in dynamic.state]
        for m in (model, twin)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*tables, strict=True))
    with collectives() as calls:
        adamw(model).step()
    assert count(calls, "allreduce") == 1
    qshard.prepare_for_fsdp1(child, gather="param_dtype")
    units = module_state.of(model).fsdp1.units
    assert [unit.gathers_codes for unit in units] == [True, False, True]
