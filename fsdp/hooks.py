"""FSDP2's all-gather hooks and the optimizer's flush, installed when the library is loaded.

Hooks are found by `hasattr` on the local tensor of a parameter (torch/distributed/fsdp/_fully_shard/
_fsdp_param.py), so they are properties of torch.Tensor that exist for quantized tensors only.
"""

import functools
import inspect
import sys
import threading
import weakref

import _qshard_debug as debug
import torch
from _qshard_library import find_impl, has_key, hook_getter
from _qshard_placement import groups_of
from torch.nn.parameter import UninitializedTensorMixin
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

ops = torch.ops.qshard


def has_tensor_type(tensor):
    """Whether a tensor is a torch.Tensor itself or any kind of Parameter that has a shape. Other subclasses
    (DTensor, FakeTensor, ShardedTensor) answer for themselves."""
    kind = type(tensor)
    return kind is torch.Tensor or (
        issubclass(kind, torch.nn.Parameter) and not issubclass(kind, UninitializedTensorMixin)
    )


def is_quantized(tensor):
    """Whether a tensor is quantized; False for a type that has_tensor_type() does not take."""
    if not has_tensor_type(tensor):
        return False
    if torch.compiler.is_compiling():  # Dynamo traces torch's functions, and none of ours
        return torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.PrivateUse3)
    return has_key(tensor)


def local_of(tensor):
    """The local tensor of a DTensor; any other tensor itself."""
    return tensor if has_tensor_type(tensor) else getattr(tensor, "_local_tensor", tensor)


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


class Numbers:
    """A number for each object that torch makes of a mesh, never given twice. Objects are told apart by
    identity: meshes that compare equal have groups of their own."""

    def __init__(self):
        self.known = {}  # id of a living object: (its weak reference, its number)
        self.last = 0

    def of(self, thing):
        known = self.known.get(id(thing))
        if known is not None and known[0]() is thing:
            return known[1]
        self.last += 1
        key = id(thing)
        reference = weakref.ref(thing, lambda gone: self.forget(key, gone))
        self.known[key] = reference, self.last
        return self.last

    def forget(self, key, gone):
        known = self.known.get(key)
        if known is not None and known[0] is gone:
            del self.known[key]


_mesh_groups = {}


def mesh_group(mesh):
    """c10d name of a 1-D mesh's group, '' for one rank. Meshes are told apart by identity."""
    known = _mesh_groups.get(id(mesh))
    if known is not None and known[0]() is mesh:
        return known[1]
    name = mesh.get_group().group_name if mesh.size() > 1 else ""
    _mesh_groups[id(mesh)] = (weakref.ref(mesh), name)
    return name


_spec_numbers = Numbers()


def dtensor_groups(dtensors):
    """The number of the groups that each DTensor's rank agrees with. Each optimizer step asks for all
    parameters. Looking groups up takes much longer than a step may, so the local tensor's buffer keeps
    the number, beside the number of the spec that it was found for."""
    local_tensors = [dtensor._local_tensor for dtensor in dtensors]
    specs = [_spec_numbers.of(dtensor._spec) for dtensor in dtensors]
    groups = ops._groups_of_specs(local_tensors, specs)
    if -1 in groups:
        for i, (dtensor, local) in enumerate(zip(dtensors, local_tensors)):
            if groups[i] == -1:
                groups[i] = groups_of(dtensor.device_mesh, dtensor.placements, dtensor.shape, local)
                ops._keep_groups_of_spec(local, specs[i], groups[i])
    return groups


# -------------------------------------------------------------------------------- FSDP2's hooks

find_impl((torch.empty(0), torch.empty(0, device="meta"), torch.nn.Parameter(torch.empty(0))))

# What the operator packets call, without their Python part: these two run per parameter and gather.
gather_over_mesh = getattr(ops._gather_over_mesh, "_op", ops._gather_over_mesh)
refresh_gathered = getattr(ops._refresh_gathered, "_op", ops._refresh_gathered)


def hook_property(hook):
    """Installs the class `hook` as torch.Tensor.<its name>, which quantized tensors alone have: an
    instance with that `shard`. FSDP2 looks hooks up some seven times per parameter and gather. Nothing
    is kept of the tensors that it asks: a weak reference would forbid torch.utils.swap_tensors, and so
    Module.to()."""
    get = hook_getter((hook, hook.name, torch.Tensor, torch.nn.Parameter))
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
    __slots__ = ("shard",)

    def __call__(self, mesh):
        group = mesh_group(mesh)
        if debug.is_on:
            self.check_written(sys._getframe(1).f_locals.get("self"), group)
        image = gather_over_mesh(self.shard, group)
        if image is None:
            is_copied = is_replicated(sys._getframe(1).f_locals.get("self"))
            ops._set_mesh_of_gathers(self.shard, group, is_copied)
            image = gather_over_mesh(self.shard, group)
        return (image,), None

    def check_written(self, fsdp_param, group):
        ops._set_reduction_group(self.shard, "" if is_replicated(fsdp_param) else group)
        debug.check_written(
            [self.shard], [debug.name_of_gathered(fsdp_param, self.shard)], [False]
        )


@hook_property
class PostAllGather:
    name = "fsdp_post_all_gather"
    __slots__ = ("shard",)

    def __call__(self, outputs, metadata, param_dtype, *, out=None):
        (image,) = outputs
        if out is not None:
            refresh_gathered(self.shard, image, local_of(out))
            return None
        refuse_unsupported(sys._getframe(1).f_locals.get("self"))
        return ops._post_all_gather(self.shard, image, param_dtype), ()


def say_who_makes_shards(fsdp_param_type):
    """FSDP2 makes a rank's shard by new_zeros, padded, and copies the rows into it where there are any.
    Which rank's it is says the caller, with or without rows."""
    for name in ("_init_sharded_param", "reset_sharded_param"):
        stock = getattr(fsdp_param_type, name, None)
        if stock is not None:
            setattr(fsdp_param_type, name, _making_shards(stock, name == "_init_sharded_param"))


def _making_shards(stock, of_whole_tensor):
    @functools.wraps(stock)
    def make(self, *args, **kwargs):
        if not of_whole_tensor:
            ops._make_shards(0)  # what is padded anew is a rank's shard already
        elif hasattr(self, "mesh_info"):
            ops._make_shards(_shard_rank(self))
        else:
            # torch 2.15 chooses a parameter's mesh in here, and asks for the shards' part of it next.
            def init_shard_mesh():
                ops._make_shards(_shard_rank(self))
                return type(self)._init_shard_mesh(self)

            self._init_shard_mesh = init_shard_mesh
        try:
            stock(self, *args, **kwargs)
        finally:
            self.__dict__.pop("_init_shard_mesh", None)
            ops._make_shards(None)
        for follow in cut_followers:
            follow(self)

    return make


cut_followers = []  # called with each of FSDP2's parameters once its shards are made


def _shard_rank(fsdp_param):
    return getattr(fsdp_param.mesh_info, "shard_mesh_rank", 0)  # replicate()'s has none


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


class StepUnderWay:
    """A step that a thread is in. taken: ids of the parameters whose step another optimizer took within it.
    is_entered_again: by the same optimizer, whose class calls the step of its base class. torch runs the
    hooks for that one, too, if the process has made an optimizer of the base class before, which other ranks
    may not have."""

    def __init__(self, optimizer):
        self.optimizer = weakref.ref(optimizer)
        self.taken = set()
        self.is_entered_again = False


class StepsUnderWay(threading.local):
    """The outermost first: some optimizers hold others and step them (torchtitan's OptimizersContainer)."""

    def __init__(self):
        self.steps: list[StepUnderWay] = []


under_way = StepsUnderWay()


def takes_part_of_steps(optimizer):
    """Whether its step lets each rank update some of the parameters, by an optimizer within it, and then
    hands them out: the flush comes after that, over all of them on all ranks."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def steps_around(optimizer):
    """Optimizers of the steps that this thread is in, but for the step of `optimizer` whose hook this is.
    torch calls hooks from `wrapper` in the file of torch.optim.Optimizer (profile_hook_step), compiled or
    not."""
    frame, found = sys._getframe(), []
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _OPTIMIZER_FILE and code.co_name == "wrapper":
            values = frame.f_locals.get("self"), *frame.f_locals.get("args", ())
            found += [v for v in values if isinstance(v, torch.optim.Optimizer)][:1]
        frame = frame.f_back
    return found[1:] if found and found[0] is optimizer else found


_OPTIMIZER_FILE = register_optimizer_step_post_hook.__code__.co_filename


# What torch.optim marks its own such methods with: torch.compile traces neither these nor what they call.
@torch._disable_dynamo
def begin_step(optimizer, args, kwargs):
    if under_way.steps:
        outer = steps_around(optimizer)
        # One that raised has left its entry, since torch calls no hook after it.
        under_way.steps = [
            step for step in under_way.steps if any(step.optimizer() is other for other in outer)
        ]
        for step in under_way.steps:
            if step.optimizer() is optimizer:
                step.is_entered_again = True
                return
    under_way.steps = [*under_way.steps, StepUnderWay(optimizer)]
    ops._set_in_step(True)


@torch._disable_dynamo
def end_step(optimizer, args, kwargs):
    """What follows a step, and not one that is a part of another."""
    steps, taken = under_way.steps, set()
    for i, step in enumerate(steps):
        if step.optimizer() is optimizer:
            if step.is_entered_again and optimizer in steps_around(optimizer):
                return
            taken = step.taken
            del steps[i:]
            break
    ops._set_in_step(bool(steps))
    if any(takes_part_of_steps(step.optimizer()) for step in steps):
        return
    if steps:
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for step in steps:
            step.taken.update(held)
    for follow in step_followers:
        follow(optimizer, taken)


def writes_by_operators_alone(optimizer):
    """Whether its step is torch's own: operators write the parameters, and kernels of ours say what they
    wrote. Other steps may write memory after such a kernel and tell no operator."""
    step = type(optimizer).step
    return step is torch.optim.AdamW.step or step is torch.optim.Adam.step


def flush_after_step(optimizer, taken):
    """One all-reduce per reduction group over the optimizer's own parameters, in their order: the
    same on all ranks whatever gradients and rows each has, which no registry of parameters is. What
    has a gradient was written: optimizers that write through addresses move no version counter. A parameter whose
    step was taken within this one makes no other; if it was written since, it is quantized."""
    first, again = [], []
    if debug.is_on:
        check_written_in_step(optimizer)
    for param_group in optimizer.param_groups:
        for param in param_group["params"]:
            local = local_of(param)
            if has_tensor_type(local) and has_key(local):
                (again if id(param) in taken else first).append((param, local))
    if first:
        # GradScaler gives it to fused optimizers, which then change nothing.
        found_inf = getattr(optimizer, "found_inf", None)
        has_grad = [param.grad is not None for param, _ in first]
        told = writes_by_operators_alone(optimizer)
        ops._flush_after_step(*with_groups(first), has_grad, found_inf, not made_up_steps, told)
    if again:
        ops._flush_after_step(*with_groups(again), [False] * len(again), None, False)


def with_groups(params):
    """The local tensors, and the numbers of their groups, 0 for what is no DTensor."""
    groups = iter(dtensor_groups([param for param, local in params if local is not param]))
    return [local for _, local in params], [
        0 if local is param else next(groups) for param, local in params
    ]


def check_written_in_step(optimizer):
    """Compares all parameters, whatever gradients this rank has: as flush_after_step() does."""
    params, names = [], []
    for number, param_group in enumerate(optimizer.param_groups):
        named = debug.names_in_optimizer(param_group, number)
        for param, name in zip(param_group["params"], named):
            local = local_of(param)
            if is_quantized(local):
                params.append((param, local))
                names.append(name)
    shards, groups = with_groups(params)
    for shard, number in zip(shards, groups):
        if number:
            ops._set_groups(shard, number)
    debug.check_written(shards, names, [param.grad is not None for param, _ in params])


# Called with an optimizer after its step, and the ids of the parameters whose step was taken within it.
step_followers = [flush_after_step]

register_optimizer_step_pre_hook(begin_step)
register_optimizer_step_post_hook(end_step)
