"""Clipping that is left to the step: torch's norm, and gradients divided by one scale while a fused step reads them."""

import pytest
import torch
from dist_helpers import device, full_mesh, on_ranks
from models.fsdp2 import build
from models.training import batch, loss_of
from models.weights import full_value
from nn_helpers import RECIPES, assert_bits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import clip_grad_norm_ as clip_as_torch, get_total_norm

import qshard

BUDGET_S = 60
FUSED = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
}
OTHERS = {
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "single": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
}
fused = pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
others = pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
CASES = {"plain": None} | RECIPES
recipes = pytest.mark.parametrize("recipe", CASES.values(), ids=CASES)


def model(recipe="float8_blockwise", dtype=torch.float32):
    """One quantized linear, one plain, and a norm: with gradients."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64)).to(dtype)
    if recipe is not None:
        qshard.quantize_(made, recipe, filter_fn=lambda _, name: name == "0")
    backward(made)
    return made


def backward(made, step=0):
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to(next(made.parameters()).dtype)
    (3 * made(x)).square().sum().backward()


def values(made):
    return [p.detach() * 1 for p in made.parameters()]


def grads(made):
    return [p.grad for p in made.parameters()]


def norm_of(made):
    return get_total_norm(grads(made)).item()


# --------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@fused
@recipes
def test_a_fused_step_divides_by_the_scale(recipe, make, dtype):
    ours, theirs = model(recipe, dtype), model(recipe, dtype)
    kept = [g.clone() for g in grads(ours)]
    optimizer, plain = make(ours.parameters()), make(theirs.parameters())
    for step in range(3):
        max_norm = 0.25 * norm_of(ours)
        norm = qshard.clip_grad_norm_(ours.parameters(), max_norm, optimizer)
        if step == 0:
            assert_bits(grads(ours), kept)  # until the step
        assert type(norm) is torch.Tensor and norm.shape == ()
        assert_bits(norm, get_total_norm(grads(theirs)))
        scale = (norm.float() + 1e-6) / max_norm
        for grad in grads(theirs):
            grad.copy_(grad.float() / scale)
        optimizer.step()
        plain.step()
        assert not hasattr(optimizer, "grad_scale")
        assert_bits(grads(ours), grads(theirs))
        if dtype is torch.float32:  # where the kernel rounds the gradient once, and not to memory
            assert_bits(values(ours), values(theirs))
        torch.testing.assert_close(values(ours), values(theirs), rtol=2e-2, atol=1e-4)
        for made, one in ((ours, optimizer), (theirs, plain)):
            one.zero_grad()
            backward(made, step + 1)


@fused
@recipes
def test_a_norm_below_the_largest_leaves_all_bits(recipe, make):
    ours, theirs = model(recipe), model(recipe)
    optimizer, plain = make(ours.parameters()), make(theirs.parameters())
    for step in range(2):
        qshard.clip_grad_norm_(ours.parameters(), 1.001 * norm_of(ours), optimizer)
        optimizer.step()
        plain.step()
        assert_bits(values(ours), values(theirs))
        assert_bits(grads(ours), grads(theirs))
        backward(ours, step + 1)
        backward(theirs, step + 1)


@recipes
def test_it_is_torchs_clipping_but_for_last_bits(recipe):
    ours, theirs = model(recipe), model(recipe)
    optimizer, plain = FUSED["sgd"](ours.parameters()), FUSED["sgd"](theirs.parameters())
    norms = [
        qshard.clip_grad_norm_(ours.parameters(), 1.0, optimizer),
        clip_as_torch(theirs.parameters(), 1.0),
    ]
    assert_bits(*norms)
    optimizer.step()
    plain.step()
    torch.testing.assert_close(grads(ours), grads(theirs), rtol=3e-7, atol=0)
    # What the docs say: they are not the same bits.
    assert any(not torch.equal(a, b) for a, b in zip(grads(ours), grads(theirs)))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, False, True])
def test_norms_of_other_orders(norm_type, foreach):
    made = model()
    optimizer = FUSED["adamw"](made.parameters())
    expected = get_total_norm(grads(made), norm_type, foreach=foreach)
    assert_bits(qshard.clip_grad_norm_(made.parameters(), 1.0, optimizer, norm_type, foreach=foreach), expected)
    torch.testing.assert_close(optimizer.grad_scale, expected + 1e-6)


# ----------------------------------------------------------- what a step cannot do by itself


@others
@recipes
def test_other_optimizers_clip_as_torch_does(recipe, make):
    ours, theirs = model(recipe), model(recipe)
    optimizer, plain = make(ours.parameters()), make(theirs.parameters())
    norm = qshard.clip_grad_norm_(ours.parameters(), 1.0, optimizer)
    assert_bits(norm, clip_as_torch(theirs.parameters(), 1.0))
    assert_bits(grads(ours), grads(theirs))
    optimizer.step()
    plain.step()
    assert_bits(values(ours), values(theirs))
    assert not hasattr(optimizer, "grad_scale")


def test_a_step_of_a_subclass_is_not_known():
    class Own(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    class Inherits(torch.optim.AdamW):
        pass

    for kind, leaves in ((Own, False), (Inherits, True)):
        made = model()
        optimizer = kind(made.parameters(), fused=True)
        qshard.clip_grad_norm_(made.parameters(), 1.0, optimizer)
        assert hasattr(optimizer, "grad_scale") == leaves
        assert (norm_of(made) < 1.01) != leaves


def test_some_of_the_parameters_are_clipped_in_place():
    """The scale would be all parameters'."""
    ours, theirs = model(), model()
    optimizer = FUSED["adamw"](ours.parameters())
    for part in ("0", "2"):
        qshard.clip_grad_norm_(ours.get_submodule(part).parameters(), 1.0, optimizer)
        clip_as_torch(theirs.get_submodule(part).parameters(), 1.0)
    assert_bits(grads(ours), grads(theirs))
    assert not hasattr(optimizer, "grad_scale")


def test_a_group_that_is_not_fused():
    made = model()
    groups = [{"params": made[0].parameters()}, {"params": [*made[1:].parameters()], "fused": False}]
    optimizer = torch.optim.AdamW(groups, fused=True)
    qshard.clip_grad_norm_(made.parameters(), 1.0, optimizer)
    assert norm_of(made) < 1.01
    optimizer.step()


def test_a_second_call_clips_what_the_first_one_leaves():
    for first, second in ((1.0, 0.5), (0.5, 1.0)):
        ours, theirs = model(), model()
        optimizer = FUSED["adamw"](ours.parameters())
        for max_norm in (first, second):
            got = qshard.clip_grad_norm_(ours.parameters(), max_norm, optimizer)
            torch.testing.assert_close(got, clip_as_torch(theirs.parameters(), max_norm))
        optimizer.step()
        torch.testing.assert_close(grads(ours), grads(theirs))


def test_a_part_after_all():
    ours, theirs = model(), model()
    optimizer = FUSED["adamw"](ours.parameters())
    qshard.clip_grad_norm_(ours.parameters(), 1.0, optimizer)
    clip_as_torch(theirs.parameters(), 1.0)
    qshard.clip_grad_norm_(ours[0].parameters(), 0.1, optimizer)
    clip_as_torch(theirs[0].parameters(), 0.1)
    torch.testing.assert_close(grads(ours), grads(theirs))
    optimizer.step()


# ------------------------------------------------------------------------- the scale's lifetime


def test_the_scale_is_for_one_step():
    made = model()
    optimizer = FUSED["adamw"](made.parameters())
    qshard.clip_grad_norm_(made.parameters(), 1e-3, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    backward(made, 1)
    kept = [g.clone() for g in grads(made)]
    optimizer.step()
    assert_bits(grads(made), kept)  # none was divided
    assert "grad_scale" not in optimizer.state_dict()


@pytest.mark.parametrize("write", ["accumulated", "assigned", "another"])
def test_a_step_of_other_gradients_is_an_error(write):
    made = model()
    optimizer = FUSED["adamw"](made.parameters())
    if write == "another":
        made[2].weight.grad = None
    qshard.clip_grad_norm_(made.parameters(), 1.0, optimizer)
    if write == "accumulated":
        backward(made, 1)
    else:
        made[2].weight.grad = torch.ones(64, 96)
    before = values(made)
    with pytest.raises(RuntimeError, match="qshard.clip_grad_norm_: gradients were written or assigned after"):
        optimizer.step()
    assert_bits(values(made), before)
    qshard.clip_grad_norm_(made.parameters(), 1.0, optimizer)  # the way out
    optimizer.step()
    assert norm_of(made) == pytest.approx(1.0, rel=1e-3)


def test_a_step_that_is_left_out():
    made = model()
    optimizer = FUSED["adamw"](made.parameters())
    qshard.clip_grad_norm_(made.parameters(), 1e-6, optimizer)
    optimizer.zero_grad()
    backward(made, 1)
    norm = norm_of(made)
    assert qshard.clip_grad_norm_(made.parameters(), 2 * norm, optimizer).item() == norm
    optimizer.step()
    assert norm_of(made) == norm
    qshard.clip_grad_norm_(made.parameters(), 1.0, optimizer)
    del optimizer.grad_scale  # the other way out
    optimizer.step()
    assert norm_of(made) == norm


def test_a_closure_clips_its_own_gradients():
    ours, theirs = model(), model()
    optimizer, plain = FUSED["sgd"](ours.parameters()), FUSED["sgd"](theirs.parameters())

    def closure(made, one, clip):
        one.zero_grad()
        backward(made, 1)
        clip()

    for _ in range(2):
        optimizer.step(
            lambda: closure(ours, optimizer, lambda: qshard.clip_grad_norm_(ours.parameters(), 1.0, optimizer))
        )
        plain.step(lambda: closure(theirs, plain, lambda: clip_as_torch(theirs.parameters(), 1.0)))
        torch.testing.assert_close(values(ours), values(theirs))
        assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("unscales", [True, False])
def test_beside_a_grad_scaler(unscales):
    results = []
    for clip in ("ours", "torch"):
        torch.manual_seed(0)
        made = qshard.quantize_(nn.Sequential(nn.Linear(64, 64)), "float8_blockwise")
        optimizer = FUSED["adamw"](made.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            loss = made(torch.randn(8, 64, generator=torch.Generator().manual_seed(step))).square().sum()
            scaler.scale(loss * (float("inf") if step == 1 else 1)).backward()
            if unscales:
                scaler.unscale_(optimizer)
            if clip == "ours":
                qshard.clip_grad_norm_(made.parameters(), 1.0, optimizer)
            else:
                clip_as_torch(made.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
        results.append((values(made), scaler.get_scale()))
    (ours, scale), (theirs, other) = results
    assert scale == other == 4.0
    torch.testing.assert_close(ours, theirs)


# ---------------------------------------------------------------------------------------- errors


def test_errors_change_nothing():
    made = model()
    optimizer = FUSED["adamw"](made[:2].parameters())
    kept = [g.clone() for g in grads(made)]
    with pytest.raises(ValueError, match=r"does not hold parameter 4 .*\(64, 96\)"):
        qshard.clip_grad_norm_(made.parameters(), 1.0, optimizer)
    with pytest.raises(TypeError, match="optimizer must be a torch.optim.Optimizer, got float"):
        qshard.clip_grad_norm_(made.parameters(), 1.0, 2.0)
    for max_norm in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="max_norm must not be negative"):
            qshard.clip_grad_norm_(made[:2].parameters(), max_norm, optimizer)
    optimizer.grad_scale = torch.tensor(2.0)
    with pytest.raises(ValueError, match="has a grad_scale that this function did not set"):
        qshard.clip_grad_norm_(made[:2].parameters(), 1.0, optimizer)
    del optimizer.grad_scale
    assert_bits(grads(made), kept)
    made[0].weight.grad[0, 0] = float("inf")
    with pytest.raises(RuntimeError, match="order 2.0 is inf, so gradients cannot be clipped"):
        qshard.clip_grad_norm_(made[:2].parameters(), 1.0, optimizer, error_if_nonfinite=True)
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_norms_that_are_not_finite_do_as_in_torch(value):
    ours, theirs = model(), model()
    for made in (ours, theirs):
        made[0].weight.grad[0, 0] = value
    optimizer = FUSED["adamw"](ours.parameters())
    qshard.clip_grad_norm_(ours.parameters(), 1.0, optimizer)
    clip_as_torch(theirs.parameters(), 1.0)
    optimizer.step()
    torch.testing.assert_close(grads(ours), grads(theirs), equal_nan=True)


def test_zero_is_a_largest_norm():
    made = model()
    optimizer = FUSED["sgd"](made.parameters())
    before = values(made)
    qshard.clip_grad_norm_(made.parameters(), 0, optimizer)
    optimizer.step()
    assert_bits(values(made), before)


def test_without_gradients():
    made = model()
    optimizer = FUSED["adamw"](made.parameters())
    optimizer.zero_grad()
    assert qshard.clip_grad_norm_(made.parameters(), 1.0, optimizer).item() == 0
    optimizer.step()


def test_frozen_parameters_need_no_place_in_the_optimizer():
    made = model()
    made[0].weight.requires_grad_(False).grad = None
    trained = [p for p in made.parameters() if p.requires_grad]
    optimizer = FUSED["adamw"](trained)
    qshard.clip_grad_norm_(made.parameters(), 1.0, optimizer)
    optimizer.step()
    assert norm_of(nn.ParameterList(trained)) == pytest.approx(1.0, rel=1e-3)


# ----------------------------------------------------------------------------------------- ranks


def steps(format, clip, make, keep_master=True):
    sharded = build(format, keep_master=keep_master)
    optimizer = make(list(sharded.parameters()))
    norms = []
    for step in range(3):
        loss_of(sharded, batch(step)).backward()
        norms.append(clip(sharded, optimizer))
        optimizer.step()
        optimizer.zero_grad()
    return norms, [full_value(p) for p in sharded.parameters()]


@pytest.mark.each_value
@pytest.mark.parametrize("keep_master", [True, False])
@pytest.mark.parametrize("format", ["float8_tensorwise", "float8_blockwise", "mxfp8"])
@on_ranks(1, 2)
def test_under_fsdp2(format, keep_master):
    def ours(sharded, optimizer):
        norm = qshard.clip_grad_norm_(sharded.parameters(), 1e-2, optimizer)
        assert type(norm) is torch.Tensor
        return norm.item()

    def as_torch(sharded, _):
        return clip_as_torch(sharded.parameters(), 1e-2).full_tensor().item()

    def large(sharded, optimizer):
        return qshard.clip_grad_norm_(sharded.parameters(), 1e6, optimizer).item()

    def none(sharded, _):
        return get_total_norm([p.grad for p in sharded.parameters()]).full_tensor().item()

    norms, got = steps(format, ours, FUSED["adamw"], keep_master)
    expected_norms, expected = steps(format, as_torch, FUSED["adamw"], keep_master)
    assert norms[0] == expected_norms[0] and min(norms) > 1e-2
    if keep_master:
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    foreach = [steps(format, clip, OTHERS["foreach"], keep_master) for clip in (ours, as_torch)]
    assert foreach[0][0] == foreach[1][0]
    assert_bits(foreach[0][1], foreach[1][1])
    results = [steps(format, clip, FUSED["adamw"], keep_master) for clip in (large, none)]
    assert results[0][0] == results[1][0]
    assert_bits(results[0][1], results[1][1])


@pytest.mark.parametrize("name", ["adamw", "rmsprop"])  # by the step, and in place
@on_ranks(2)
def test_parameters_of_two_meshes_and_plain_ones(name):
    """torch stacks the norms of one kind only."""
    meshes = full_mesh(), init_device_mesh(device().type, (1, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(0)
    whole = [torch.randn(8, 4, device=device()) for _ in range(4)]
    zeros = torch.zeros(8, 4, device=device())
    cut = [distribute_tensor(zeros, mesh, [Shard(0)] * mesh.ndim) for mesh in meshes]
    parameters = [nn.Parameter(value) for value in (*cut, zeros, zeros.clone())]
    for parameter, grad in zip(parameters, whole):
        parameter.grad = grad.clone()
        if isinstance(parameter, DTensor):
            parameter.grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
    optimizer = (FUSED | OTHERS)[name](parameters)
    norm = qshard.clip_grad_norm_(parameters, 1.0, optimizer)
    torch.testing.assert_close(norm, get_total_norm(whole))
    if hasattr(optimizer, "grad_scale"):
        assert_bits(optimizer.grad_scale, norm + 1e-6)
    else:
        got = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
        torch.testing.assert_close(got, [g / norm for g in whole])
