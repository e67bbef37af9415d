"""An optimizer over quantized parameters, beside the same optimizer over plain ones: alone, under FSDP2 and HSDP.

With a master each step must leave the bits of the plain step. Without one it must leave the plain step from the
dequantized value, quantized as a whole tensor is.
"""

import contextlib
import io

import torch
from dist_helpers import device, full_mesh
from helpers import assert_same, is_quantized, ops, quantized_alike, value, weight
from models.weights import full_value, local
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import qshard
from qshard._runtime.classes import TensorState

STEPS = 5
RELOADED_BEFORE = {2: "state_dict", 3: "dcp"}  # by step: how the states go to a new optimizer
# By name: shape and format. Rows are uneven on two ranks, and cut blocks of "wide" and "low".
MATRICES = {
    "wide": ((257, 140), "float8_blockwise"),
    "tall": ((65, 32), "float8_tensorwise"),
    "low": ((41, 64), "nvfp4"),
    "narrow": ((33, 48), "mxfp8"),
}
EVEN_MATRICES = {
    "wide": ((192, 140), "float8_blockwise"),
    "tall": ((64, 32), "float8_tensorwise"),
    "low": ((40, 64), "nvfp4"),
}
EQUAL_MATRICES = {
    "first": ((64, 48), "float8_blockwise"),
    "second": ((64, 48), "float8_tensorwise"),
    "third": ((64, 48), "nvfp4"),
}
STACKS = {"stack": ((3, 40, 64), "float8_blockwise"), "low_stack": ((5, 16, 48), "nvfp4")}
ONE_ROW = {"row": ((1, 32), "float8_rowwise")}  # rank 1 has none
PLAIN = {"bias": ((7,), None)}
ALL = {**MATRICES, **STACKS, **ONE_ROW, **PLAIN}


class Parameters(nn.Module):
    def __init__(self, values, formats, keep_master):
        super().__init__()
        for name, tensor in values.items():
            fmt = formats.get(name)
            made = tensor.clone() if fmt is None else ops.quantize(tensor, fmt, keep_master=keep_master)
            self.register_parameter(name, nn.Parameter(made))


def build(shapes, keep_master, mesh, dtype=torch.float32):
    """Quantized parameters and their plain twins, of the same values."""
    formats = {name: fmt for name, (_, fmt) in shapes.items()}
    values = {
        name: weight(*shape, seed=i, dtype=dtype).to(device())
        for i, (name, (shape, _)) in enumerate(shapes.items())
    }
    ours = Parameters(values, formats, keep_master)
    theirs = Parameters({name: value(p) for name, p in ours.named_parameters()}, {}, False)
    if mesh is not None:
        ours, theirs = (fully_shard(model, mesh=mesh) for model in (ours, theirs))
    return ours, theirs


def distributed(whole, like):
    """A whole tensor, which each rank has, cut as a parameter is."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def set_gradients(step, *models):
    """The same gradients for all models: of ordinary size, zero in step 1, and large in step 3."""
    for i, named in enumerate(zip(*(model.named_parameters() for model in models))):
        size = {1: 0.0, 3: 1e4}.get(step, 1.0)
        for name, param in named:
            whole = weight(*param.shape, seed=100 * step + i) * size
            param.grad = distributed(whole.to(param.device, param.dtype), param)


@contextlib.contextmanager
def events():
    """Yields a dict that holds, after the block, the calls of operators by name."""
    counts = {}
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        yield counts
    for event in profile.profiler.kineto_results.events():  # their tree takes longer than a step
        counts[event.name()] = counts.get(event.name(), 0) + 1


def reductions(counts):
    return sum(number for name, number in counts.items() if name.startswith("c10d::allreduce"))


def through_a_file(states):
    """Copies, as torch.save makes them: some states of torchao have no deepcopy."""
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def reload(how, make, model, optimizer):
    """A new optimizer with the states of `optimizer`."""
    new = make(model)
    if how == "dcp":
        set_optimizer_state_dict(model, new, through_a_file(get_optimizer_state_dict(model, optimizer)))
    else:
        new.load_state_dict(through_a_file(optimizer.state_dict()))
    return new


def tensors_in(state, path=""):
    """(path, tensor) of every tensor in an optimizer's state of a parameter."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, dict):
        for key in state:
            yield from tensors_in(state[key], f"{path}.{key}")
    elif isinstance(state, list | tuple):
        for i, item in enumerate(state):
            yield from tensors_in(item, f"{path}.{i}")


def inner_tensors(tensor):
    """The plain tensors that a wrapper subclass holds, as torchao's states do."""
    tensor = local(tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in inner_tensors(getattr(tensor, name))]
    return [tensor]


def check_states(name, ours, theirs):
    got, want = dict(tensors_in(ours)), dict(tensors_in(theirs))
    assert got.keys() == want.keys(), (name, got.keys(), want.keys())
    for path in want:
        for mine, plain in zip(inner_tensors(got[path]), inner_tensors(want[path]), strict=True):
            assert not is_quantized(mine), f"the state {name}{path} is quantized"
            assert_same(mine, plain, f"in the state {name}{path}")


def round_twin(twin, quantized):
    """Gives a twin what its value is once quantized: as a whole, on one device."""
    whole = full_value(twin)
    shown = ops.dequantize(quantized_alike(whole, local(quantized)))
    local(twin.detach()).copy_(local(distributed(shown, twin)))


def check(ours, theirs, ours_by, theirs_by, keep_master, states_too):
    for (name, param), twin in zip(ours.named_parameters(), theirs.parameters()):
        if is_quantized(local(param)):
            mine = local(param)
            assert not TensorState(mine).has_pending_update(), f"{name} awaits a flush"
            if keep_master:
                # The codes are those of the whole value, whatever rows a rank has.
                shown = ops.dequantize(quantized_alike(full_value(twin), mine))
                assert_same(ops.dequantize(mine), local(distributed(shown, twin)), f"in the codes of {name}")
            else:
                round_twin(twin, param)
                assert TensorState(mine).storage_bytes()["pending"] == 0
        assert_same(local(param), local(twin), f"in {name}")
        if states_too:
            check_states(name, ours_by.state[param], theirs_by.state[twin])


def one_step(optimizer, before):
    with events() as counts:
        before(optimizer)
        optimizer.step()
    return counts


def certify(
    make,
    shapes,
    *,
    keep_master,
    mesh=None,
    dtype=torch.float32,
    before=lambda optimizer: None,
    after=None,
    reloads=RELOADED_BEFORE,
    states_too=True,
):
    """Steps `make(model)` over quantized parameters and over plain ones, and compares them after each step.

    before, after: what the optimizer's user calls around a step. mesh: a shape, for fully_shard. One flush follows
    each step, with one all-reduce where there are other ranks."""
    mesh = full_mesh(*mesh, names=("replicas", "shards")[-len(mesh) :]) if mesh else None
    ours, theirs = build(shapes, keep_master, mesh, dtype)
    ours_by, theirs_by = make(ours), make(theirs)
    for step in range(STEPS):
        if how := reloads.get(step):
            ours_by = reload(how, make, ours, ours_by)
            theirs_by = reload(how, make, theirs, theirs_by)
        set_gradients(step, ours, theirs)
        of_ours, of_theirs = (one_step(optimizer, before) for optimizer in (ours_by, theirs_by))
        assert of_ours["qshard::_flush_after_step"] == 1
        assert reductions(of_ours) - reductions(of_theirs) == (mesh is not None)
        with torch.no_grad():
            check(ours, theirs, ours_by, theirs_by, keep_master, states_too)
            if after:
                after(ours_by), after(theirs_by)
                qshard.flush(ours)
                check(ours, theirs, ours_by, theirs_by, keep_master, states_too)
    return ours, ours_by
