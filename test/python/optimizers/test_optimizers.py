"""I5: a stock optimizer step on a parameter with a master is that step on a plain parameter.

Without a master the parameter is what remains after rounding: each step equals quantizing the plain
update of the dequantized value.
"""

import copy
import warnings

import pytest
import torch
from dist_helpers import full_mesh, on_ranks
from helpers import (
    FORMATS,
    assert_same,
    assert_unchanged,
    is_quantized,
    ops,
    quantized_alike,
    rounded,
    shown_to_dgrad,
    state,
    value,
    weight,
)
from models.training import train_by_sgd
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import Parameter

import qshard
from qshard._runtime.classes import TensorState

BUDGET_S = 45
OPTIMIZERS = {
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW for-loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "AdamW amsgrad maximize": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, maximize=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), fused=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SGD for-loop": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "SGD nesterov decay": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True, momentum=0.5),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
}
SHAPES = [(150, 140), (1, 16), (3, 40, 24), (64, 40)]  # a format each


def quantized(keep_master, dtype=torch.float32):
    return [
        Parameter(
            ops.quantize(
                weight(*shape, seed=i, dtype=dtype), FORMATS[i % len(FORMATS)], keep_master=keep_master
            )
        )
        for i, shape in enumerate(SHAPES)
    ]


def plain_twins(parameters):
    return [Parameter(value(p)) for p in parameters]


def set_gradients(seed, *parameter_lists):
    for parameters in parameter_lists:
        for i, p in enumerate(parameters):
            p.grad = weight(*p.shape, seed=1000 * seed + i).to(p.dtype)


def step_alike(seed, *lists_with_optimizers):
    """One step of each optimizer, with the same gradients."""
    for parameters, optimizer in lists_with_optimizers:
        set_gradients(seed, parameters)
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_with_a_master_equal_plain_steps(name):
    """Lists mix quantized and plain parameters."""
    bias = [Parameter(torch.zeros(7)), Parameter(weight(5, 5))]
    parameters = [*quantized(keep_master=True), *bias]
    twins = plain_twins(parameters)
    ours, theirs = OPTIMIZERS[name](parameters), OPTIMIZERS[name](twins)
    for step in range(20):
        step_alike(step, (parameters, ours), (twins, theirs))
    for p, twin in zip(parameters, twins):
        assert_same(p, twin)
        if is_quantized(p):
            assert_same(ops.master(p), twin)
            assert_same(ops.dequantize(p), ops.dequantize(quantized_alike(twin.detach(), p)))
            assert not TensorState(p).has_pending_update()
        for key, plain in theirs.state[twin].items():
            kept = ours.state[p][key]
            assert not is_quantized(kept)
            if isinstance(plain, torch.Tensor):
                assert_same(kept, plain)


def test_lbfgs_steps_as_on_plain_parameters():
    """It keeps flat copies of parameters and gradients, and calls a closure several times a step."""
    parameters = quantized(keep_master=True)
    twins = plain_twins(parameters)
    for ps in (parameters, twins):
        optimizer = torch.optim.LBFGS(ps, lr=0.1, max_iter=4)

        def closure(ps=ps, optimizer=optimizer):
            optimizer.zero_grad()
            loss = sum((p * p).sum() for p in ps[:-1])
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
    for p, twin in zip(parameters, twins):
        assert_same(p, twin)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["AdamW foreach", "AdamW fused", "AdamW for-loop", "SGD fused"])
def test_low_precision_masters_step_as_plain_tensors_of_their_dtype(name, dtype):
    parameters = quantized(keep_master=True, dtype=dtype)
    twins = plain_twins(parameters)
    ours, theirs = OPTIMIZERS[name](parameters), OPTIMIZERS[name](twins)
    for step in range(5):
        step_alike(step, (parameters, ours), (twins, theirs))
    for p, twin in zip(parameters, twins):
        assert_same(p, twin)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_a_master_each_step_rounds_the_plain_update(name):
    parameters = quantized(keep_master=False)
    twins = plain_twins(parameters)
    ours, theirs = OPTIMIZERS[name](parameters), OPTIMIZERS[name](twins)
    for step in range(5):
        step_alike(step, (parameters, ours), (twins, theirs))
        with torch.no_grad():
            for p, twin in zip(parameters, twins):
                twin.copy_(ops.dequantize(quantized_alike(twin.detach(), p)))
                assert_same(p, twin)
                assert TensorState(p).storage_bytes()["pending"] == 0  # freed by the flush after the step


def test_training_with_gradients_of_its_own():
    """The same loop on quantized and plain layers; gradients come from the quantized forward."""
    layer = torch.nn.Linear(32, 20)
    layer.weight = Parameter(ops.quantize(weight(20, 32), "float8_blockwise", keep_master=True))
    twin = Parameter(weight(20, 32))
    ours, theirs = OPTIMIZERS["AdamW fused"]([layer.weight]), OPTIMIZERS["AdamW fused"]([twin])
    for step in range(4):
        x = weight(6, 32, seed=step)
        before = rounded(twin.detach(), "float8_blockwise")
        assert_same(layer(x), torch.nn.functional.linear(x, before, layer.bias))
        layer(x).square().sum().backward()
        twin.grad = layer.weight.grad.clone()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_same(layer.weight, twin)


@pytest.mark.parametrize("name", ["AdamW foreach", "AdamW fused", "SGD for-loop"])
@pytest.mark.parametrize("keep_master", [False, True], ids=["no master", "master"])
def test_grad_scaler_skips_a_step_with_an_inf(name, keep_master):
    parameters = quantized(keep_master)
    twins = plain_twins(parameters)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    optimizers = [OPTIMIZERS[name](parameters), OPTIMIZERS[name](twins)]
    for step in range(4):
        set_gradients(step, parameters, twins)
        if step == 2:
            parameters[0].grad[3, 5] = twins[0].grad[3, 5] = float("inf")
        before = [state(p) for p in parameters]
        shown = [shown_to_dgrad(p.detach()) for p in parameters]
        for scaler, optimizer in zip(scalers, optimizers):
            scaler.scale(torch.ones(()))  # the first scale() makes the scaler's tensors
            scaler.step(optimizer)
            scaler.update()
        if step == 2:
            for p, unchanged, values in zip(parameters, before, shown):
                if keep_master:
                    assert_unchanged(p, unchanged)
                # Else fused steps have quantized the value again: the same values, but other codes
                # and scales where the largest code of a block had been rounded to 224 * 2^k.
                assert_same(shown_to_dgrad(p.detach()), values)
        if not keep_master:
            with torch.no_grad():
                for p, twin in zip(parameters, twins):
                    twin.copy_(ops.dequantize(quantized_alike(twin.detach(), p)))
        for p, twin in zip(parameters, twins):
            assert_same(p, twin)


def test_step_in_inference_mode_then_training():
    parameters = quantized(keep_master=True)
    twins = plain_twins(parameters)
    optimizers = [OPTIMIZERS["AdamW foreach"](parameters), OPTIMIZERS["AdamW foreach"](twins)]
    for step in range(3):
        set_gradients(step, parameters, twins)
        for optimizer in optimizers:
            with torch.inference_mode(step == 1):
                optimizer.step()
    for p, twin in zip(parameters, twins):
        assert_same(p, twin)
    (parameters[0] * 2).sum().backward()


def test_optimizer_state_round_trips():
    parameters = quantized(keep_master=True)
    optimizer = OPTIMIZERS["AdamW foreach"](parameters)
    set_gradients(0, parameters)
    optimizer.step()
    copied = quantized(keep_master=True)
    with torch.no_grad():
        for p, c in zip(parameters, copied):
            c.copy_(p)
    other = OPTIMIZERS["AdamW foreach"](copied)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # it shares tensors else
    set_gradients(1, parameters, copied)
    optimizer.step(), other.step()
    for p, c in zip(parameters, copied):
        assert_same(p, c)


def test_gradient_utilities_take_quantized_parameters():
    parameters = quantized(keep_master=True)
    twins = plain_twins(parameters)
    set_gradients(0, parameters, twins)
    norms = [torch.nn.utils.clip_grad_norm_(p, 1.0) for p in (parameters, twins)]
    assert torch.equal(*norms)
    assert torch.equal(*(torch.nn.utils.get_total_norm(p) for p in (parameters, twins)))
    vectors = [torch.nn.utils.parameters_to_vector(p) for p in (parameters, twins)]
    assert_same(*vectors)
    with pytest.raises(RuntimeError, match=r"x.data.copy_\(y\) writes"):  # it assigns .data
        torch.nn.utils.vector_to_parameters(vectors[0] * 2, parameters)
    models = [torch.nn.ParameterList(p) for p in (parameters, twins)]
    averages = [torch.optim.swa_utils.AveragedModel(m) for m in models]
    for step in range(3):
        for p in (*parameters, *twins):
            p.data.add_(1)
        for average, model in zip(averages, models):
            average.update_parameters(model)
    for p, twin in zip(*(average.parameters() for average in averages)):
        assert_same(p, twin)


# Fused kernels stay one call under Inductor; foreach is lowered to loops over raw pointers.
def test_compiled_fused_step():
    parameters = quantized(keep_master=True)
    twins = plain_twins(parameters)
    optimizers = [OPTIMIZERS["AdamW tensor lr"](p) for p in (parameters, twins)]
    torch._dynamo.reset()
    compiled = torch.compile(optimizers[0].step)
    for step in range(3):
        set_gradients(step, parameters, twins)
        compiled()
        optimizers[1].step()
        for p, twin in zip(parameters, twins):
            assert_same(p, twin)
            assert_same(ops.dequantize(p), ops.dequantize(quantized_alike(twin.detach(), p)))


@pytest.mark.parametrize("name", ["AdamW foreach", "AdamW fused", "AdamW for-loop"])
def test_compiled_steps_write_through_the_address_and_are_seen(name):
    """Inductor's code writes to memory and moves the version counter, and calls no operator."""
    parameters = quantized(keep_master=True)
    twins = plain_twins(parameters)
    torch._dynamo.reset()
    steps = [torch.compile(OPTIMIZERS[name](some).step) for some in (parameters, twins)]
    for seed in range(2):
        set_gradients(seed, parameters, twins)
        for step in steps:
            step()
        for p, twin in zip(parameters, twins):
            assert_same(p, twin)
            assert_same(ops.dequantize(p.detach()), ops.dequantize(quantized_alike(twin.detach(), p)))
    torch._dynamo.reset()


def test_compiled_steps_without_a_master_name_what_works():
    parameters = quantized(keep_master=False)
    optimizer = OPTIMIZERS["AdamW foreach"](parameters)
    set_gradients(0, parameters)
    before = [state(p) for p in parameters]
    torch._dynamo.reset()
    with pytest.raises(Exception, match="bytes of .* are codes.*fused=True"):
        torch.compile(optimizer.step)()
    for p, unchanged in zip(parameters, before):
        assert_unchanged(p, unchanged)
    torch._dynamo.reset()


@on_ranks(2, devices=("cpu",))
def test_steps_without_a_master_are_not_warned_of_as_merges_are():
    """[in a step of a sharded model, by hand], of a local shard, which requires no gradient."""
    model = nn.Sequential(nn.Linear(48, 64, bias=False))
    qshard.quantize_(model, qshard.Float8BlockScaling(), keep_master=False)
    fully_shard(model, mesh=full_mesh())
    said = []
    torch.set_warn_always(True)
    try:
        for change in (
            lambda: train_by_sgd(model, range(2), features=48),
            lambda: model[0].weight.data.add_(0.5),
        ):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                change()
            said.append(any("the sum is rounded" in str(w.message) for w in caught))
    finally:
        torch.set_warn_always(False)
    assert said == [False, True]


def test_parameters_can_be_swapped_after_a_step():
    """Module.to may swap parameters, and torch.utils.swap_tensors refuses those that have a
    weak reference."""
    for params in (quantized(True), [Parameter(weight(3, 4))]):
        optimizer = OPTIMIZERS["AdamW fused"](params)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()
        for param in params:
            other = Parameter(param.detach().clone() + 1)
            expected = value(other.detach())
            torch.utils.swap_tensors(param, other)
            assert_same(value(param.detach()), expected)
