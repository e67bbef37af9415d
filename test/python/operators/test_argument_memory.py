"""Memory that is not what an operator takes it for: freed, of another size or dtype than a tensor's planes
and state have. Errors by name, where pointers were read before."""

import pytest
import torch
from argument_values import FORMAT, weight
from flat_ranges import agree
from forked import refusal
from helpers import FORMATS, bits

from qshard._runtime.classes import SavedTensor, TensorState

ops = torch.ops.qshard
X = torch.randn(4, 48)


# ------------------------------------------------------------------------------------- freed storages

FREED = {
    "_pre_all_gather": lambda q: bits(ops._pre_all_gather(q, "")),
    "pack": lambda q: TensorState(q).pack(),
    "shared_planes": lambda q: TensorState(q).shared_planes(),
    "_flush_after_step": lambda q: ops._flush_after_step([q], [0], [True], None),
    "flush": lambda q: (ops._mark_written(q), ops.flush([q])),
    "copy_": lambda q: q.copy_(torch.ones(64, 48)),
    "copy_ of quantized": lambda q: q.copy_(weight()),
    "copy_ from": lambda q: weight(keep_master=TensorState(q).keeps_master()).copy_(q),
    "copy_ from to plain": lambda q: torch.ones(64, 48).copy_(q),
    "clone": lambda q: q.clone(),
    "add": lambda q: q + 1,
    "add_": lambda q: q.add_(1),
    "linear": lambda q: ops.linear(X, q),
    "dequantize": lambda q: ops.dequantize(q),
    "codes": lambda q: ops.codes(q),
    "copy_buffer": lambda q: TensorState(q).copy_buffer(),
    "quantize": lambda q: ops.quantize(q, FORMAT),
    "_quantize_for_uses": lambda q: ops._quantize_for_uses(q, FORMAT, []),
    "_message_amax": lambda q: ops._message_amax(q, "float8_tensorwise"),
    "quantize_gradients": lambda q: ops.quantize_gradients(q, "float8", 1, 64 * 48),
}


@pytest.mark.parametrize("keep_master", [False, True], ids=["codes", "master"])
@pytest.mark.parametrize("name", FREED)
# These read codes alone, which are not freed with a master.
@pytest.mark.only_where(
    lambda name, keep_master: not keep_master or name not in ("dequantize", "codes", "_pre_all_gather")
)
def test_a_freed_storage_is_an_error_by_name(name, keep_master):
    q = weight(keep_master=keep_master)
    q.untyped_storage().resize_(0)
    text = refusal(lambda: FREED[name](q))
    assert "freed" in text or (not keep_master and "bytes of float8_blockwise are codes" in text)


def test_quantized_gradients_and_inputs_of_linears_are_read_by_value():
    q, grad, x = weight(), torch.randn(4, 64), X.clone()
    expected = ops.linear_backward(grad, q, x, False, True, True)

    def quantized(tensor):
        return ops.quantize(tensor, FORMAT, keep_master=True)

    given = ops.linear_backward(quantized(grad), q, quantized(x), False, True, True)
    assert all(torch.equal(a, b) for a, b in zip(given, expected))
    # A write that waits for its flush is the value; it was an error after half of the work.
    waits, sum = ops.quantize(x, FORMAT, logical_rows=256), torch.zeros(4, 48)
    none, grad_weight = ops.linear_backward(grad, q, waits, False, True, True, input_sum=sum)
    assert none.numel() == 0 and torch.equal(sum, expected[0]) and torch.equal(grad_weight, expected[1])
    for name in ("grad", "input"):
        freed = {"grad": quantized(grad), "input": quantized(x)}
        freed[name].untyped_storage().resize_(0)
        text = refusal(
            lambda: ops.linear_backward(freed["grad"], q, freed["input"], False, True, True)
        )
        assert "freed" in text


def test_freed_plain_tensors_are_refused_by_name():
    for name in ("input", "bias"):
        x, bias = X.clone(), torch.ones(64)
        (x if name == "input" else bias).untyped_storage().resize_(0)
        assert f"the memory of {name}" in refusal(lambda: ops.linear(x, weight(), bias))


# ------------------------------------------------------------------------------------- shared planes


def shared(q, **changed):
    names = "master codes pending layout format state".split()
    given = dict(zip(names, TensorState(q).shared_planes()))
    given |= dict(size=[64, 48], stride=[48, 1], storage_offset=0, dtype=torch.float32) | changed
    arguments = (*names[1:5], "size", "stride", "storage_offset", "dtype", "state")
    return SavedTensor(*(given[name] for name in arguments)).over_shared_planes(given["master"])


def test_shared_planes_are_a_tensor_again():
    for format in (*FORMATS, "nvfp4[stochastic]"):
        q = weight(format, keep_master="stochastic" not in format)
        assert torch.equal(bits(ops.dequantize(shared(q))), bits(ops.dequantize(q)))


@pytest.mark.parametrize("format", ["float8_delayed", "float8_blockwise"])
@pytest.mark.parametrize("keep_master", [False, True], ids=["codes", "master"])
def test_shared_planes_that_do_not_fit_are_refused(format, keep_master):
    q = weight(format, keep_master=keep_master)
    master, codes, _, layout, _, state = TensorState(q).shared_planes()
    written = [*layout[:6], 1, *layout[7:]]
    wrong = [
        dict(dtype=torch.int64),
        dict(dtype=torch.float64),
        dict(codes=codes[16:].clone()),
        dict(codes=codes[16:]),
        dict(codes=codes.view(torch.int32)),
        dict(master=None if keep_master else torch.zeros(64, 48)),
        dict(master=torch.zeros(64, 48, dtype=torch.bfloat16)),
        dict(master=torch.zeros(63, 48)),
        dict(pending=torch.zeros(1)),
        dict(pending=torch.zeros(1), layout=written),
        dict(pending=torch.zeros(64, 48).double(), layout=written),
        dict(state=[torch.zeros(1), torch.zeros(1)]),
        dict(state=[torch.zeros(1)]),
        dict(layout=[*layout[:5], 7, *layout[6:]]),
        dict(layout=[2**39, *layout[1:]]),
        dict(layout=[-1, *layout[1:]]),
        dict(format="x" * 100_000),
        dict(size=[65, 48]),
    ]
    for change in wrong:
        assert "qshard" in refusal(lambda: bits(shared(q, **change) + 0)), change


# ------------------------------------------------------------------------------------ gathered bytes


def test_bytes_of_another_tensor_are_not_gathered_into_one():
    q = weight()
    gathered = ops._post_all_gather(q, ops._pre_all_gather(q, "").clone(), torch.float32)
    kept = bits(ops.dequantize(gathered))
    for other in (weight("mxfp8"), weight(cols=32), weight(rows=32)):
        image = ops._pre_all_gather(other, "").clone()
        assert "not those of" in refusal(lambda: ops._refresh_gathered(other, image, gathered))
    image = ops._pre_all_gather(q, "").clone()
    for wrong in (image[16:], image.view(torch.int32), torch.cat([image, image]), image.to("meta")):
        assert "not those of" in refusal(lambda: ops._refresh_gathered(q, wrong, gathered))
    master = weight(keep_master=True)
    assert "not a gathered tensor" in refusal(lambda: ops._refresh_gathered(q, image, master))
    ops._refresh_gathered(q, image, gathered)
    assert torch.equal(bits(ops.dequantize(gathered)), kept)


# ---------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize(
    "change", [dict(dtype=torch.uint8), dict(dtype=torch.float64), dict(scaling=(9,), history=(1,))]
)
def test_state_of_delayed_scaling_has_its_dtype_and_size(change):
    dtype = change.get("dtype", torch.float32)
    history = torch.zeros(change.get("history", (3, 16)), dtype=dtype)
    scaling = torch.zeros(change.get("scaling", (3, 3)), dtype=dtype)
    of = [("float8_delayed[history=16]", 4, 48, 0)]
    text = refusal(lambda: agree([torch.ones(4, 48)], of, state=[history, scaling], steps=[7]))
    assert "qshard::_agree_on_ranges" in text
