"""FSDP2's all-gather hooks and the optimizer's flush, installed when the library is loaded.

Hooks are found by `hasattr` on the local tensor of a parameter (torch/distributed/fsdp/_fully_shard/
_fsdp_param.py), so they are properties of torch.Tensor that exist for quantized tensors only.
"""

import inspect
import sys
import threading
import weakref

import _qshard_debug as debug
import torch
from _qshard_placement import groups_of
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

ops = torch.ops.qshard
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)


def is_quantized(tensor):
    """Exact types only: a subclass (DTensor, FakeTensor, ShardedTensor) answers for itself."""
    return type(tensor) in _TENSOR_TYPES and _has_key(tensor)


def _has_key(tensor, keys=torch._C._dispatch_keys, key=torch._C.DispatchKey.PrivateUse3):
    return keys(tensor).has(key)


def local_of(tensor):
    """The local tensor of a DTensor; any other tensor itself."""
    return tensor if type(tensor) in _TENSOR_TYPES else getattr(tensor, "_local_tensor", tensor)


def tensor_property(name):
    """Installs `make(tensor)` as torch.Tensor.<name>, absent on tensors that are not quantized."""

    def install(make):
        def get(self):
            if not is_quantized(self):
                raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
            return make(self)

        setattr(torch.Tensor, name, property(get))
        return make

    return install


# ------------------------------------------------------------------------------ reduction groups

_mesh_groups = {}


def mesh_group(mesh):
    """c10d name of a 1-D mesh's group, '' for one rank. Meshes are told apart by identity."""
    known = _mesh_groups.get(id(mesh))
    if known is not None and known[0]() is mesh:
        return known[1]
    name = mesh.get_group().group_name if mesh.size() > 1 else ""
    _mesh_groups[id(mesh)] = (weakref.ref(mesh), name)
    return name


_dtensor_groups = {}  # id of a living DTensor: (its weak reference, local tensor, groups)


def dtensor_groups(dtensor):
    """The number of the groups that this DTensor's rank agrees with. Asked of each parameter at each
    optimizer step: finding them out takes much longer than that. DTensors are told apart by identity:
    torch hands one spec to many, whose local tensors may be shares of different things."""
    key, local = id(dtensor), dtensor._local_tensor
    known = _dtensor_groups.get(key)
    if known is None or known[1]() is not local:
        reference = weakref.ref(dtensor, lambda _: _dtensor_groups.pop(key, None))
        groups = groups_of(dtensor.device_mesh, dtensor.placements, dtensor.shape, local)
        known = _dtensor_groups[key] = reference, weakref.ref(local), groups
    return known[2]


# -------------------------------------------------------------------------------- FSDP2's hooks

# What the operator packets call, without their Python part: these two run per parameter and gather.
pre_all_gather = getattr(ops._pre_all_gather, "_op", ops._pre_all_gather)
refresh_gathered = getattr(ops._refresh_gathered, "_op", ops._refresh_gathered)


def hook_property(hook):
    """Installs the class `hook` as torch.Tensor.<its name>: one object per shard, kept. FSDP2 looks
    hooks up two to five times per parameter and gather, and asking for a tensor's keys is the slow
    part: of plain parameters, too, the answer is kept."""
    known = {}  # id of a living tensor: (its weak reference, its hook or None)

    def look_up(tensor):
        key = id(tensor)
        reference = weakref.ref(tensor, lambda _: known.pop(key, None))
        found = known[key] = reference, hook(reference) if is_quantized(tensor) else None
        return found

    def get(tensor):
        _, found = known.get(id(tensor)) or look_up(tensor)
        if found is None:
            raise AttributeError(hook.name)
        return found

    setattr(torch.Tensor, hook.name, property(get))
    return hook


@hook_property
class PreAllGather:
    name = "fsdp_pre_all_gather"
    # One argument, not five: the five-argument form asserts on the size of padded shards, on the
    # padded ranks only, and leaves the others in the collective (pytorch#137005).
    __signature__ = inspect.Signature(
        [inspect.Parameter("mesh", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    )
    __slots__ = ("shard", "mesh", "group")

    def __init__(self, shard):
        self.shard = shard  # a weak reference
        self.mesh = None

    def __call__(self, mesh):
        if mesh is not self.mesh:
            is_cut = not is_replicated(sys._getframe(1).f_locals.get("self"))
            self.mesh, self.group = mesh, mesh_group(mesh) if is_cut else ""
        if debug.is_on:
            shard = self.shard()
            ops._set_reduction_group(shard, self.group)
            fsdp_param = sys._getframe(1).f_locals.get("self")
            debug.check_written([shard], [debug.name_of_gathered(fsdp_param, shard)], [False])
        return (pre_all_gather(self.shard(), self.group),), None


@hook_property
class PostAllGather:
    name = "fsdp_post_all_gather"
    __slots__ = ("shard",)

    def __init__(self, shard):
        self.shard = shard

    def __call__(self, outputs, metadata, param_dtype, *, out=None):
        (image,) = outputs
        if out is not None:
            refresh_gathered(self.shard(), image, local_of(out))
            return None
        refuse_unsupported(sys._getframe(1).f_locals.get("self"))
        return ops._post_all_gather(self.shard(), image, param_dtype), ()


def is_replicated(fsdp_param):
    """Whether `replicate()` made this of FSDP2's parameters: it has a mesh, whose ranks hold the same
    rows. The local tensor looks as one that was cut by columns does. FSDP2's attribute is read if it is
    there; without, the parameter counts as cut."""
    mesh_info = getattr(fsdp_param, "mesh_info", None)
    return hasattr(mesh_info, "replicate_mesh_size") and not hasattr(mesh_info, "shard_mesh_size")


def refuse_unsupported(fsdp_param):
    """Names what FSDP2 cannot do with any all-gather extension, at the first gather.

    FSDP2 itself fails later, with an error that does not say why. Its attributes are read if they
    are there; without them its own error stands.
    """
    post_forward = getattr(fsdp_param, "post_forward_mesh_info", None)
    if post_forward is not None and post_forward is not fsdp_param.mesh_info:
        raise NotImplementedError(
            "qshard: reshard_after_forward=<int> is not supported for quantized parameters (FSDP2 "
            "has no hook for it); use True or False"
        )


# ------------------------------------------------------------------------------ optimizer.step()


made_up_steps = []  # not empty during one (fsdp/checkpoint.py)


class StepsUnderWay(threading.local):
    """[weak reference to an optimizer, ids of the parameters whose step another one took within its
    own], the outermost first: some optimizers hold others and step them (torchtitan's
    OptimizersContainer)."""

    def __init__(self):
        self.steps = []


under_way = StepsUnderWay()


def takes_part_of_steps(optimizer):
    """Whether its step lets each rank update some of the parameters, by an optimizer within it, and then
    hands them out: the flush comes after that, over all of them on all ranks."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


# What torch.optim marks its own such methods with: torch.compile traces neither these nor what they call.
@torch._disable_dynamo
def begin_step(optimizer, args, kwargs):
    # A step that failed left its entry here.
    others = [step for step in under_way.steps if step[0]() not in (None, optimizer)]
    under_way.steps = [*others, [weakref.ref(optimizer), set()]]
    ops._set_in_step(True)


@torch._disable_dynamo
def end_step(optimizer, args, kwargs):
    """What follows a step, and not one that is a part of another."""
    steps, taken = under_way.steps, set()
    for i, step in enumerate(steps):
        if step[0]() is optimizer:
            taken = step[1]
            del steps[i:]
            break
    ops._set_in_step(bool(steps))
    if any(takes_part_of_steps(step[0]()) for step in steps):
        return
    if steps:
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for step in steps:
            step[1].update(held)
    for follow in step_followers:
        follow(optimizer, taken)


def flush_after_step(optimizer, taken):
    """One all-reduce per reduction group over the optimizer's own parameters, in their order: the
    same on all ranks whatever gradients and rows each has, which no registry of parameters is. What
    has a gradient was written: optimizers that write through addresses tell nobody. A parameter whose
    step was taken within this one makes no other; if it was written since, it is quantized."""
    first, again = ([], [], []), ([], [], [])
    if debug.is_on:
        check_written_in_step(optimizer)
    for param_group in optimizer.param_groups:
        for param in param_group["params"]:
            local = local_of(param)
            if is_quantized(local):
                is_first = id(param) not in taken
                shards, groups, has_grad = first if is_first else again
                shards.append(local)
                groups.append(0 if local is param else dtensor_groups(param))
                has_grad.append(is_first and param.grad is not None)
    if first[0]:
        # GradScaler gives it to fused optimizers, which then change nothing.
        found_inf = getattr(optimizer, "found_inf", None)
        ops._flush_after_step(*first, found_inf, not made_up_steps)
    if again[0]:
        ops._flush_after_step(*again, None, False)


def check_written_in_step(optimizer):
    """Compares all parameters, whatever gradients this rank has: as flush_after_step() does."""
    shards, names, has_grad = [], [], []
    for number, param_group in enumerate(optimizer.param_groups):
        named = debug.names_in_optimizer(param_group, number)
        for param, name in zip(param_group["params"], named):
            local = local_of(param)
            if is_quantized(local):
                if local is not param:
                    ops._set_groups(local, dtensor_groups(param))
                shards.append(local)
                names.append(name)
                has_grad.append(param.grad is not None)
    debug.check_written(shards, names, has_grad)


# Called with an optimizer after its step, and the ids of the parameters whose step was taken within it.
step_followers = [flush_after_step]

register_optimizer_step_pre_hook(begin_step)
register_optimizer_step_post_hook(end_step)
