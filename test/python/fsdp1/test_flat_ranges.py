"""Ranges of weights that flat parameters cut anywhere: amaxes, histories, and the messages of FSDP1's gather."""

import pytest
import torch
from flat_ranges import agree, lists_of, messages_of, own_amaxes

from qshard._runtime.classes import TensorState

ops = torch.ops.qshard
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
NO_STEP, STEP, HELD, REACHED = 0, 1, 2, 4
OF_IT = STEP | HELD | REACHED
HISTORY = "float8_delayed[history=4]"


def random_values(*shape, at="cpu", seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(at)


# ------------------------------------------------------------------------------------- amaxes


@pytest.mark.parametrize("at", DEVICES)
@pytest.mark.parametrize("cols", [1, 100, 128, 257])
@pytest.mark.parametrize("format", ["float8_tensorwise", "float8_blockwise"])
def test_ranges_have_the_amaxes_of_the_whole(format, cols, at):
    rows = 130
    value = random_values(rows, cols, at=at)
    value[0, 0], value[129, -1] = 300.0, float("inf")
    whole, = own_amaxes([value], [(format, rows, cols, 0)])
    cuts = sorted({0, 1, cols - 1, cols, 3 * cols + cols // 2, 64 * cols, rows * cols})
    parts = [(a, b) for a, b in zip(cuts, cuts[1:])]
    amaxes = own_amaxes([value.flatten()[a:b] for a, b in parts], [(format, rows, cols, a) for a, _ in parts])
    assert torch.equal(torch.stack(amaxes).amax(0), whole)
    blocks = -(-rows // 128) * -(-cols // 128) if format == "float8_blockwise" else 1
    assert whole.numel() == blocks and whole.max() == float("inf")
    none, = own_amaxes([value.flatten()[:0]], [(format, rows, cols, 5)])
    assert not none.any()


@pytest.mark.parametrize("at", DEVICES)
def test_ranges_of_many_weights_in_one_call(at):
    """Their formats, shapes and dtypes differ, and each result is as by itself."""
    values, ranges = [], []
    for format, rows, cols, start, numel, dtype in (
        ("float8_blockwise", 300, 256, 100, 70000, torch.float32),
        ("float8_tensorwise", 7, 33, 40, 3, torch.bfloat16),
        ("float8_tensorwise", 64, 64, 0, 4096, torch.float64),
        ("float8_blockwise", 129, 200, 129 * 200, 0, torch.float16),
    ):
        values.append(random_values(numel, at=at).to(dtype))
        ranges.append((format, rows, cols, start))
    together = own_amaxes(values, ranges)
    for i, amax in enumerate(together):
        assert torch.equal(amax, *own_amaxes(values[i : i + 1], ranges[i : i + 1]))
    assert [amax.numel() for amax in together] == [6, 1, 1, 4]


def test_amaxes_that_are_known_are_not_looked_for():
    value, of = random_values(16, 32), [("float8_tensorwise", 16, 32, 0)]
    known, amax = torch.tensor([3.0]), torch.zeros(1)
    agree([value.flatten()[:0]], of, own=[known], is_known=[True], amax=[amax])
    assert amax == 3 and known == 3
    agree([value], of, own=[known], is_known=[False], amax=[amax])
    assert amax == known == value.abs().max()


# ---------------------------------------------------------------------------------- histories


def new_state(value, format=HISTORY):
    state = [table.clone() for table in TensorState(ops.quantize(value, format)).scaling_state().values()]
    state[0][1:, 0] = torch.tensor([2.0, 0.5])  # what a linear has collected of its input and gradient in this step
    return state


def tables_after(steps, values, found_inf=None):
    state, amax, answers = new_state(values[0]), torch.zeros(1), []
    for step, value in zip(steps, values):
        answers += agree(
            [value], [(HISTORY, *value.shape, 0)], amax=[amax], state=state, steps=[step], found_inf=found_inf
        )
    return state, amax, answers


def test_histories_roll_of_steps_alone():
    values = [random_values(16, 32) * factor for factor in (1, 8, 2)]
    for step, answer in (NO_STEP, 0), (STEP, 0), (STEP | HELD, 0), (STEP | REACHED, 0), (OF_IT, 1):
        state, amax, answers = tables_after([step] * 3, values)
        assert answers == [answer] * 3
        rolled = answer == 1
        assert state[0][0].count_nonzero() == (3 if rolled else 0)
        assert torch.equal(state[0][1:, 0], torch.zeros(2) if rolled else torch.tensor([2.0, 0.5]))
        # A step is scaled by what the one before left, other values by their own.
        assert amax == (values[1] if rolled else values[2]).abs().max().reshape(1)
        assert amax == state[1][0, 0]


def test_a_skipped_step_rolls_nothing():
    values = [random_values(16, 32)]
    state, amax, _ = tables_after([OF_IT], values, found_inf=torch.ones(1))
    wanted, same, _ = tables_after([NO_STEP], values)
    assert torch.equal(amax, same) and all(map(torch.equal, state, wanted))


def test_histories_agree_without_values():
    state = new_state(random_values(16, 32))
    before = state[0].clone()
    assert ops._agree_on_histories([state[0], torch.empty(0)], [2, 0], 0, torch.device("cpu")) == [2, 0]
    assert torch.equal(state[0], before)
    with pytest.raises(ValueError, match="a level is 0 to 2, got 3"):
        ops._agree_on_histories([state[0]], [3], 0, torch.device("cpu"))
    with pytest.raises(ValueError, match="a history is plain contiguous float32 of 3 rows"):
        ops._agree_on_histories([torch.ones(4)], [2], 0, torch.device("cpu"))


def test_what_does_not_fit_is_refused_before_anything_is_written():
    value, of = random_values(16, 32), [("float8_tensorwise", 16, 32, 0)]
    delayed = [(HISTORY, 16, 32, 0)]
    state = new_state(value)
    own, before = [torch.zeros(1)], [table.clone() for table in state]
    refused = {
        "do not lie within": lambda: agree([value], [("float8_blockwise", 16, 32, 1)]),
        "scales lie in the rows": lambda: agree([value], [("nvfp4", 16, 32, 0)]),
        "1 ranges, and 2 tensors of values": lambda: agree([value, value], of),
        "has 1 amaxes": lambda: agree([value], of, own=[torch.ones(2)]),
        "a step is 0, 1, 3, 5 or 7, got 4": lambda: agree([value], of, own=own, steps=[4]),
        "1 ranges, 2 steps": lambda: agree([value], of, own=own, steps=[0, 0]),
        "needs two state tensors": lambda: agree([value], delayed, own=own, state=state[:1]),
        "is not the state of": lambda: agree([value], delayed, own=own, state=state[::-1]),
        "0 in all, got 2": lambda: agree([value], of, own=own, state=state),
        "found_inf must be one plain number": lambda: agree([value], of, own=own, found_inf=torch.ones(2)),
    }
    for match, call in refused.items():
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(TypeError, match="plain, contiguous float32"):
        agree([value.int()], of, own=own)
    with pytest.raises(RuntimeError, match="no groups of number"):
        agree([value], delayed, own=own, state=state, groups=[10**6])
    assert own[0] == 0 and all(map(torch.equal, state, before))


# ----------------------------------------------------------------------------------- messages


def codes_in(messages, weight, shard_numel, itemsize=2):
    """The codes of one weight among plain values, put together by hand."""
    found = []
    start, end = weight[3], weight[3] + weight[1] * weight[2]
    for rank, message in enumerate(messages):
        begin, stop = max(start, rank * shard_numel), min(end, (rank + 1) * shard_numel)
        plain = shard_numel - max(0, stop - begin)
        at = -(-plain * itemsize // 16) * 16
        found.append(message[at : at + max(0, stop - begin)])
        assert not message[plain * itemsize : at].any() and not message[at + max(0, stop - begin) :].any()
    return torch.cat(found)


@pytest.mark.parametrize("at", DEVICES)
@pytest.mark.parametrize("world", [1, 2, 3, 16])
@pytest.mark.parametrize("cols", [1, 100, 128, 257])
@pytest.mark.parametrize("format", ["float8_tensorwise", "float8_blockwise"])
def test_messages_have_the_codes_of_the_whole(format, cols, world, at):
    """Shards end within rows and blocks; before the weight and behind it are plain values."""
    rows, before = 130, 37
    value = random_values(rows, cols, at=at)
    value[0, 0], value[129, -1] = 300.0, float("inf")
    flat = torch.cat([random_values(before, at=at, seed=1), value.flatten(), random_values(11, at=at, seed=2)])
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % world))
    weight = (format, rows, cols, before)
    amax = own_amaxes([value], [(format, rows, cols, 0)])
    messages = messages_of(flat, world, [weight], amax)
    whole = ops.quantize(value, format)
    codes = codes_in(messages, weight, len(flat) // world)
    assert torch.equal(codes, ops.codes(whole).view(torch.uint8).flatten())
    expected = flat.bfloat16()
    expected[before : before + value.numel()] = ops.dequantize(whole, dtype=torch.bfloat16).flatten()
    out = torch.full_like(expected, 7.0)
    ops._read_messages(messages, *lists_of([weight]), amax, out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("at", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_messages_of_many_weights(dtype, at):
    weights = [("float8_blockwise", 130, 100, 5), ("float8_tensorwise", 7, 33, 13005)]
    weights += [("float8_blockwise", 3, 200, 13300)]
    flat = random_values(13920, at=at).to(dtype)
    expected, amaxes = flat.half(), []
    for format, rows, cols, start in weights:
        value = flat[start : start + rows * cols].view(rows, cols)
        value = value.float() if dtype == torch.float64 else value
        amaxes += own_amaxes([value], [(format, rows, cols, 0)])
        shown = ops.dequantize(ops.quantize(value, format), dtype=torch.float16)
        expected[start : start + rows * cols] = shown.flatten()
    messages = messages_of(flat, 5, weights, amaxes, torch.float16)
    out = torch.full_like(expected, 7.0)
    ops._read_messages(messages, *lists_of(weights), amaxes, out)
    assert torch.equal(out, expected)
    meta = torch.empty(len(flat) // 5, device="meta")
    of_meta = [amax.to("meta") for amax in amaxes]
    size = ops._write_message(meta, 0, 5, *lists_of(weights), of_meta, torch.float16)
    assert size.is_meta and size.shape == messages[0].shape


def test_messages_refuse_what_does_not_fit():
    flat, weight, amax = random_values(520), ("float8_tensorwise", 16, 32, 5), [torch.ones(1)]
    good = messages_of(flat, 2, [weight], amax)
    out, kept = torch.zeros(520), torch.zeros(520)
    refused = {
        "does not lie behind": lambda: messages_of(flat, 2, [("float8_tensorwise", 16, 32, 9)], amax),
        "512 elements from 5 on": lambda: messages_of(flat, 2, [weight, weight], amax * 2),
        "there is no rank 2 of 2": lambda: ops._write_message(
            flat, 2, 2, *lists_of([weight]), amax, torch.float32
        ),
        "tensors of amaxes": lambda: messages_of(flat, 2, [weight], []),
        "bytes, got": lambda: ops._read_messages(good[:, 1:].contiguous(), *lists_of([weight]), amax, out),
        "in equal shards": lambda: ops._read_messages(good, *lists_of([weight]), amax, out[1:]),
    }
    for match, call in refused.items():
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(TypeError, match="gathered in float32"):
        messages_of(flat, 2, [weight], amax, torch.float64)
    with pytest.raises(TypeError, match="a shard must be plain, contiguous"):
        messages_of(flat.int(), 2, [weight], amax)
    assert torch.equal(out, kept)
