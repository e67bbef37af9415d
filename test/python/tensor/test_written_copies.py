"""Copies and new tensors that are written by another name than their own: values of a state_dict,
what DCP loads into, NumPy, an address. A layer multiplies what was written, as in plain torch."""

import copy
import io
import tempfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from helpers import FORMATS, assert_same, fit, is_quantized, ops, quantized_alike, value, weight
from program_alias_steps import memory_of
from test_aliased_writes import COLS, ROWS, assert_codes_are_of_the_value, linear
from torch import nn

import qshard
from qshard._runtime.classes import TensorState

formats = pytest.mark.parametrize("fmt", FORMATS)
keep_or_not = pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])


def layer_of(tensor):
    layer = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False)
    layer.weight = nn.Parameter(tensor.detach())
    return layer


def dcp_load(layer, values):
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"weight": values}, checkpoint_id=folder, no_dist=True)
        dcp.load(layer.state_dict(), checkpoint_id=folder, no_dist=True)


def by_numpy(layer, values):
    layer.weight.detach().numpy()[...] = values.numpy()
    mark(layer.weight)


def by_address(layer, values):
    memory_of(layer.weight.detach()).copy_(values)
    mark(layer.weight)


def by_dlpack(layer, values):
    torch.from_dlpack(layer.weight.detach()).copy_(values)
    mark(layer.weight)


def mark(tensor):
    """A raw write is said of quantized tensors."""
    if is_quantized(tensor):
        qshard.mark_written(tensor)


def data_of_state_dict(layer, values):
    layer.state_dict()["weight"].data.copy_(values)
    mark(layer.weight)


def by_state_dict_twice(layer, values):
    layer.state_dict()["weight"].zero_()
    layer.state_dict()["weight"].lerp_(values, 1.0)


def rows_of_state_dict(layer, values):
    target = layer.state_dict()["weight"]
    target[:7].copy_(values[:7])
    target[7:].copy_(values[7:])


WRITES = {
    "copy_": lambda layer, values: layer.weight.detach().copy_(values),
    "data": lambda layer, values: layer.weight.data.copy_(values),
    "state_dict": lambda layer, values: layer.state_dict()["weight"].copy_(values),
    "state_dict, data": data_of_state_dict,
    "state_dict, twice": by_state_dict_twice,
    "state_dict, rows": rows_of_state_dict,
    "load_state_dict": lambda layer, values: layer.load_state_dict({"weight": values}),
    "dcp": dcp_load,
    "numpy": by_numpy,
    "address": by_address,
    "dlpack": by_dlpack,
}
NEEDS_ADDRESS = ("numpy", "address", "dlpack")
writes = pytest.mark.parametrize("write", WRITES)
NEW = {
    "new_empty": lambda w: w.new_empty(w.shape),
    "new_zeros": lambda w: w.new_zeros(w.shape),
    "empty_like": torch.empty_like,
    "zeros_like": torch.zeros_like,
    "new_full": lambda w: w.new_full(w.shape, 2.0),
    "new_zeros, fewer rows": lambda w: w.new_zeros(32, w.shape[1]),
}


BEFORE = ("fresh", "multiplied", "flushed", "written", "multiplied twice")


@torch.no_grad()
def product(layer):
    weight = layer.weight
    return layer(torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device))


def assert_multiplies(layer, values, note=""):
    """The values themselves, if the weight is plain, or codes of them."""
    w = layer.weight.detach()
    eye = torch.eye(w.shape[1], dtype=w.dtype, device=w.device)
    if is_quantized(w) and TensorState(w).keeps_master():
        assert_same(w, values, note)
    got, plain = product(layer), F.linear(eye, values)
    if torch.equal(got, plain):
        return
    assert is_quantized(w), note
    codes = quantized_alike(values, w, TensorState(w).keeps_master())
    assert_same(got, F.linear(eye, ops.dequantize(codes)), note)


@pytest.mark.pairwise
@pytest.mark.parametrize("before", BEFORE)
@writes
@pytest.mark.parametrize("new", NEW)
@keep_or_not
@formats
def test_a_new_tensor_that_is_written(fmt, keep_master, new, write, before):
    w = linear(fmt, keep_master)[0].weight.detach()
    layer = layer_of(NEW[new](w))
    for _ in range(2 if before == "multiplied twice" else 1):
        if before.startswith("multiplied"):
            product(layer)
    if before == "flushed" and is_quantized(layer.weight):
        ops.flush([layer.weight.detach()])
    if before == "written":
        layer.weight.detach().add_(1)
    for seed in (5, 6):
        values = weight(*layer.weight.shape, seed=seed)
        WRITES[write](layer, values)
        assert_multiplies(layer, values)


@pytest.mark.pairwise
@writes
@keep_or_not
@formats
def test_an_optimizer_goes_on_with_what_was_written(fmt, keep_master, write):
    """A new weight, values from a checkpoint, and a step with the same gradient."""
    layer = layer_of(linear(fmt, keep_master)[0].weight.new_empty(fit(fmt, ROWS), COLS))
    values, grad = (weight(*layer.weight.shape, seed=seed) for seed in (5, 6))
    WRITES[write](layer, values)
    layer.weight.grad = grad
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    stepped = values.add(grad, alpha=-0.1)
    if not is_quantized(layer.weight) or TensorState(layer.weight.detach()).keeps_master():
        assert_multiplies(layer, stepped)
    else:  # without a master the value was rounded before the step
        error = (value(layer.weight) - stepped).norm() / stepped.norm()
        assert error < 0.25, error


# ----------------------------------------------------------- one tensor's data in another


def copy_data(target, online):
    target.weight.data.copy_(online.weight.data)


@torch.no_grad()
def copy_parameter(target, online):
    target.weight.copy_(online.weight)


@torch.no_grad()
def foreach_copy(target, online):
    torch._foreach_copy_([target.weight], [online.weight])


def set_data(target, data):
    target.weight.data = data


COPIES = {
    "data.copy_": copy_data,
    "copy_": copy_parameter,
    "foreach": foreach_copy,
    "load_state_dict": lambda target, online: target.load_state_dict(online.state_dict()),
    "detach": lambda target, online: target.weight.detach().copy_(online.weight.detach()),
    "data = data": lambda target, online: set_data(target, online.weight.data.clone()),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("forward", [True, False], ids=["forward", "no-forward"])
@writes
@pytest.mark.parametrize("copied", COPIES)
@keep_or_not
@formats
def test_a_copied_weight_that_is_written(fmt, keep_master, copied, write, forward):
    """Target networks: online values arrive, a forward reads them, a checkpoint is loaded."""
    if write in NEEDS_ADDRESS and not keep_master:
        return  # codes have no address: test_addresses.py
    target, online = (linear(fmt, keep_master, seed=seed)[0] for seed in (1, 2))
    for seed in (5, 6):
        COPIES[copied](target, online)
        assert_same(target.weight, value(online.weight))
        if forward:
            assert_same(product(target), product(online))
        values = weight(*target.weight.shape, seed=seed)
        WRITES[write](target, values)
        assert_multiplies(target, values)
        assert_codes_are_of_the_value(target.weight)
        assert_codes_are_of_the_value(online.weight)


@keep_or_not
@formats
def test_a_checkpoint_over_a_target_network(fmt, keep_master):
    target, online = (linear(fmt, keep_master, seed=seed)[0] for seed in (1, 2))
    for write in ("dcp", "state_dict", "dcp"):
        copy_data(target, online)
        product(target)
        values = weight(*target.weight.shape, seed=5)
        WRITES[write](target, values)
        assert_multiplies(target, values, write)


@keep_or_not
@formats
def test_a_checkpoint_over_a_new_tensor(fmt, keep_master):
    w = linear(fmt, keep_master)[0].weight.detach()
    for new in NEW:
        layer = layer_of(NEW[new](w))
        values = weight(*layer.weight.shape, seed=5)
        dcp_load(layer, values)
        assert_multiplies(layer, values, new)


# ------------------------------------------------------------------------------ inference mode


@keep_or_not
@formats
def test_a_checkpoint_over_a_model_copied_in_inference_mode(fmt, keep_master):
    layer = linear(fmt, keep_master)[0]
    with torch.inference_mode():
        copied = copy.deepcopy(layer)
        product(copied)
        for write in ("dcp", "state_dict, twice"):
            values = weight(*layer.weight.shape, seed=5)
            WRITES[write](copied, values)
            assert_multiplies(copied, values, write)


def pickled(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


MADE = {
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "clone": lambda layer: layer_of(layer.weight.detach().clone()),
    "to": lambda layer: layer_of(layer.weight.detach().to("cpu", copy=True)),
    "quantize": lambda layer: layer_of(
        ops.quantize(value(layer.weight), ops.format(layer.weight), keep_master=True)
    ),
    "quantize_": lambda layer: linear(ops.format(layer.weight).split("[")[0])[0],
    "new_empty": lambda layer: layer_of(layer.weight.detach().new_empty(layer.weight.shape)),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("read", [True, False], ids=["read", "not-read"])
@writes
@pytest.mark.parametrize("made", MADE)
@keep_or_not
@formats
def test_what_was_made_in_inference_mode_is_written_there(fmt, keep_master, made, write, read):
    layer = linear(fmt, keep_master)[0]
    with torch.inference_mode():
        copied = MADE[made](layer)
        if write in NEEDS_ADDRESS and not is_plain_or_master(copied.weight):
            return
        for seed in (5, 6):
            if read:
                product(copied)
            values = weight(*copied.weight.shape, seed=seed)
            WRITES[write](copied, values)
            assert_multiplies(copied, values)
    assert_codes_are_of_the_value(layer.weight)


def is_plain_or_master(tensor):
    return not is_quantized(tensor) or TensorState(tensor).keeps_master()


ELSEWHERE = ("dcp", "state_dict", "state_dict, twice", "load_state_dict", "copy_", "data")


@pytest.mark.pairwise
@pytest.mark.parametrize("write", ELSEWHERE)
@pytest.mark.parametrize("made", ["deepcopy", "clone"])
@keep_or_not
@formats
def test_what_was_made_in_inference_mode_is_written_elsewhere(fmt, keep_master, made, write):
    """Where plain torch refuses, so may we, after the write, as it does."""
    plain, layer = layer_of(weight(ROWS, COLS)), linear(fmt, keep_master)[0]
    with torch.inference_mode():
        plain, copied = MADE[made](plain), MADE[made](layer)
        product(copied)
    refused = (RuntimeError, dcp.api.CheckpointException)
    values = weight(*copied.weight.shape, seed=5)
    plain_error = error_of(WRITES[write], plain, weight(ROWS, COLS, seed=5), refused)
    error = error_of(WRITES[write], copied, values, refused)
    assert plain_error or not error, error
    if error:
        assert_codes_are_of_the_value(copied.weight)
    else:
        assert_multiplies(copied, values)


def error_of(write, layer, values, kinds):
    try:
        write(layer, values)
    except kinds as error:
        return error
    return None
