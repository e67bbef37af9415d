"""Storages that are freed and made anew, as FSDP and sleeping inference engines do by resize_(0) and back:
nothing that was known of the bytes before holds for those after."""

import pytest
import torch
from helpers import FORMATS, assert_same, bits, fit, ops, rounded, value, weight

from qshard._runtime.classes import TensorState
from qshard.formats import info_of

on_formats = pytest.mark.parametrize("fmt", FORMATS)


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device(request.param)


def quantized(fmt, device, keep_master, seed=0):
    values = weight(fit(fmt, 200), 48, seed=seed).to(device)
    if info_of(fmt).scale.power_of_two:  # quantized once more they have these codes, not their values alone
        values = rounded(values, fmt)
    q = ops.quantize(values, fmt, keep_master=keep_master)
    ops.flush([q])
    return q


def flat(storage):
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def renew(storage):
    """The allocator often gives back the memory it was given: other bytes there make that no help."""
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    flat(storage).fill_(0xFF)


def assert_alike(q, other):
    ops.flush([q])
    assert_same(q, other)
    for accessor in (ops.codes, ops.scale_inv):
        assert torch.equal(bits(accessor(q)), bits(accessor(other)))


@pytest.mark.parametrize("keep_master", [False, True], ids=["no-master", "master"])
@on_formats
def test_a_copy_brings_codes_and_scales(fmt, keep_master, device):
    q = quantized(fmt, device, keep_master)
    like_it = q.clone()  # of one generation, within which rows are copied without scales
    half = fit(fmt, 96)
    copies = {
        "whole": lambda: q.copy_(like_it),
        "halves": lambda: (q[:half].copy_(like_it[:half]), q[half:].copy_(like_it[half:])),
        "values, then codes": lambda: (q.copy_(value(like_it) * 3), q.copy_(like_it)),
    }
    for copy in copies.values():
        renew(q.untyped_storage())
        copy()
        assert_alike(q, like_it)
    if keep_master:
        for copy in copies.values():
            renew(ops.codes(q).untyped_storage())
            copy()
            assert_alike(q, like_it)


@on_formats
def test_codes_follow_a_master_that_was_filled_through_its_storage(fmt, device):
    q, filled = quantized(fmt, device, True), quantized(fmt, device, True, seed=1)
    renew(q.untyped_storage())
    flat(q.untyped_storage()).copy_(flat(filled.untyped_storage()))
    if fmt == "float8_delayed":  # scaled by its own history
        return assert_same(q, filled)
    assert_alike(q, filled)


@on_formats
def test_codes_are_made_again_of_the_master(fmt, device):
    q = quantized(fmt, device, True)
    before = q.clone()
    renew(ops.codes(q).untyped_storage())
    if fmt != "float8_delayed":
        assert torch.equal(ops.dequantize(q), ops.dequantize(before))
        assert_alike(q, before)
    assert_same(q, before)


@pytest.mark.parametrize("keep_master", [False, True], ids=["no-master", "master"])
def test_state_dicts_are_loaded_after_a_sleep(keep_master, device):
    """Weights are freed, memory comes back, and a state_dict of the same model is loaded."""
    model, other = (torch.nn.Linear(48, 200, bias=False, device=device) for _ in range(2))
    for module, seed in ((model, 0), (other, 1)):
        q = quantized("float8_blockwise", device, keep_master, seed)
        module.weight = torch.nn.Parameter(q)
    other.load_state_dict(model.state_dict())
    for module in (model, other):
        kept = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        renew(module.weight.untyped_storage())
        module.load_state_dict(kept)
    assert_alike(other.weight.detach(), model.weight.detach())
    assert_same(model.weight, quantized("float8_blockwise", device, keep_master))


def test_other_tensors_stay_as_they_are(device):
    q, other = (quantized("float8_blockwise", device, False, seed) for seed in range(2))
    twin = other.clone()
    for _ in range(3):
        renew(q.untyped_storage())
        assert not TensorState(other).pack()[2][6]
        other[:64].copy_(twin[:64])  # still of one generation: as bytes
        assert not TensorState(other).pack()[2][6]
    assert_alike(other, twin)
