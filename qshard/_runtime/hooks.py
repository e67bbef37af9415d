"""FSDP2's all-gather hooks and the optimizer's flush, installed when the library is loaded.

Hooks are found by `hasattr` on the local tensor of a parameter (torch/distributed/fsdp/_fully_shard/
_fsdp_param.py), so they are properties of torch.Tensor that exist for quantized tensors only.
"""

import functools
import inspect
import sys
import threading
import weakref

import torch
from torch.nn.parameter import UninitializedTensorMixin

from qshard._runtime import debug
from qshard._runtime.classes import Process, TensorState
from qshard._runtime.library import find_impl, has_key, hook_getter
from qshard._runtime.patches import call, put, unwrap, wrap
from qshard._runtime.placement import groups_of, with_local

ops = torch.ops.qshard


def has_tensor_type(tensor):
    """Whether a tensor is a torch.Tensor itself or any kind of Parameter that has a shape. Other subclasses
    (DTensor, FakeTensor, ShardedTensor) answer for themselves."""
    kind = type(tensor)
    return kind is torch.Tensor or (
        issubclass(kind, torch.nn.Parameter) and not issubclass(kind, UninitializedTensorMixin)
    )


def holds_codes(tensor):
    """Whether a tensor itself is quantized: False for a type that has_tensor_type() does not take. The public
    is_quantized asks a DTensor's local tensor and fake tensors, too."""
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
            if not holds_codes(self):
                raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
            return make(self)

        put(f"torch:Tensor.{name}", property(get))
        return make

    return install


class OfPackage:
    """Functions of the package's rooms above this one. `import qshard` sets each once; where only the library
    is loaded they are None."""

    note_cut = None  # (FSDP2's parameter), once its shards are made: qshard/dynamic_weights/weights.py
    roll_histories = None  # (optimizer, taken), after the flush of its step: the same file
    agree_in_units = None  # (optimizer, taken), after that: qshard/dynamic_weights/fsdp1.py
    take_samples = None  # (), after that, while a watch runs: qshard/watching/__init__.py


of_package = OfPackage()


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
                TensorState(local).keep_groups_of_spec(specs[i], groups[i])
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
    put(f"torch:Tensor.{hook.name}", property(get))
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
        image = gather_over_mesh(self.shard, group)
        if image is None:  # FSDP2 made this shard before the library was loaded: _tell_shard came too late
            TensorState(self.shard).set_mesh_of_gathers(group, False)
            image = gather_over_mesh(self.shard, group)
        return (image,), None


@hook_property
class PostAllGather:
    name = "fsdp_post_all_gather"
    __slots__ = ("shard",)

    def __call__(self, outputs, metadata, param_dtype, *, out=None):
        (image,) = outputs
        if out is not None:
            refresh_gathered(self.shard, image, local_of(out))
            return None
        return ops._post_all_gather(self.shard, image, param_dtype), ()


FSDP_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param"


@wrap(f"{FSDP_PARAM}:FSDPParam._init_sharded_param")
def _making_first_shards(stock):
    """FSDP2 makes a rank's shard by new_zeros, padded, and copies the rows into it where there are any.
    Which rank's it is says the caller, with or without rows."""

    @functools.wraps(stock)
    def _init_sharded_param(self, *args, **kwargs):
        if hasattr(self, "mesh_info"):
            Process.make_shards(_shard_rank(self))
        else:
            # torch 2.15 chooses a parameter's mesh in here, and asks for the shards' part of it next.
            def init_shard_mesh():
                Process.make_shards(_shard_rank(self))
                return type(self)._init_shard_mesh(self)

            self._init_shard_mesh = init_shard_mesh
        try:
            stock(self, *args, **kwargs)
        finally:
            self.__dict__.pop("_init_shard_mesh", None)
            Process.make_shards(None)
        _follow_shards(self)

    return _init_sharded_param


@wrap(f"{FSDP_PARAM}:FSDPParam.reset_sharded_param")
def _making_shards_anew(stock):
    @functools.wraps(stock)
    def reset_sharded_param(self, *args, **kwargs):
        Process.make_shards(0)  # what is padded anew is a rank's shard already
        try:
            stock(self, *args, **kwargs)
        finally:
            Process.make_shards(None)
        _follow_shards(self)

    return reset_sharded_param


def _follow_shards(fsdp_param):
    _tell_shard(fsdp_param)
    if of_package.note_cut is not None:
        of_package.note_cut(fsdp_param)


def _tell_shard(fsdp_param):
    """Tells a quantized shard what the mesh of its gathers is to it. FSDP2 gives its all-gather hooks the mesh,
    and no word of whether replicate() made the parameter."""
    shard = local_of(fsdp_param.sharded_param)
    fsdp_param.__dict__.pop("init_unsharded_param", None)
    if not holds_codes(shard):
        return
    group = mesh_group(fsdp_param.shard_mesh_from_root)
    TensorState(shard).set_mesh_of_gathers(group, is_replicated(fsdp_param))
    post_forward = getattr(fsdp_param, "post_forward_mesh_info", None)
    if post_forward is not None and post_forward is not fsdp_param.mesh_info:
        fsdp_param.init_unsharded_param = refuse_resharding  # called at the end of each gather


def refuse_resharding():
    """FSDP2 itself fails later, with an error that does not say why: it has no hook for a parameter that is cut
    anew after forward (torch/distributed/fsdp/_fully_shard/_fsdp_param.py: all_gather_inputs)."""
    raise NotImplementedError(
        "qshard: reshard_after_forward=<int> is not supported for quantized parameters (FSDP2 "
        "has no hook for it); use True or False"
    )


def compare_writes(enabled):
    """qshard.debug(): while it is on, every gather begins by comparing what the ranks know to be written."""
    debug.is_on = enabled
    (wrap if enabled else unwrap)(f"{FSDP_PARAM}:FSDPParam.all_gather_inputs")(_comparing_first)


def _comparing_first(stock):
    def all_gather_inputs(self):
        shard = local_of(self.sharded_param)
        if holds_codes(shard):
            group = mesh_group(self.shard_mesh_from_root)
            TensorState(shard).set_reduction_group("" if is_replicated(self) else group)
            debug.check_written([shard], [debug.name_of_gathered(self, shard)], [False])
        return stock.fget(self)

    return property(all_gather_inputs)


if debug.is_on:
    compare_writes(True)


def _shard_rank(fsdp_param):
    return getattr(fsdp_param.mesh_info, "shard_mesh_rank", 0)  # replicate()'s has none


def is_replicated(fsdp_param):
    """Whether `replicate()` made this of FSDP2's parameters: it has a mesh, whose ranks hold the same
    rows. The local tensor looks as one that was cut by columns does. FSDP2's attribute is read if it is
    there; without, the parameter counts as cut."""
    mesh_info = getattr(fsdp_param, "mesh_info", None)
    return hasattr(mesh_info, "replicate_mesh_size") and not hasattr(mesh_info, "shard_mesh_size")


# ------------------------------------------------------------------------------ optimizer.step()


synthetic_steps = []  # not empty while DCP makes a step up (checkpoint.py)


class StepUnderWay:
    """A step that a thread is in. taken: ids of the parameters whose step another optimizer took within it.
    is_bracketed: `bracket` ends it, however the step ends."""

    def __init__(self, optimizer, is_bracketed):
        self.optimizer = optimizer
        self.is_bracketed = is_bracketed
        self.has_begun = False
        self.taken = set()


class StepsUnderWay(threading.local):
    """The outermost first: some optimizers hold others and step them (torchtitan's OptimizersContainer)."""

    def __init__(self):
        self.steps: list[StepUnderWay] = []

    def end(self, step):
        """Ends a step and those within it."""
        if step in self.steps:
            del self.steps[self.steps.index(step) :]
        Process.set_in_step(bool(self.steps))


under_way = StepsUnderWay()


def bracket(step):
    """An optimizer class's `step` that is under way from its call to its end. torch calls no hook after a step
    that raised (torch/optim/optimizer.py: profile_hook_step)."""

    @functools.wraps(step)
    def bracketed(self, *args, **kwargs):
        here = StepUnderWay(self, is_bracketed=True)
        under_way.steps.append(here)
        try:
            return step(self, *args, **kwargs)
        finally:
            under_way.end(here)

    return bracketed


def all_subclasses(kind):
    for each in kind.__subclasses__():
        yield each
        yield from all_subclasses(each)


@wrap("torch.optim.optimizer:Optimizer.profile_hook_step")
def _bracketing_steps(stock):
    """torch wraps the `step` of a class when its first optimizer is made."""

    @functools.wraps(stock)
    def profile_hook_step(func):
        return bracket(stock(func))

    for kind in all_subclasses(torch.optim.Optimizer):
        step = vars(kind).get("step")
        if getattr(step, "hooked", False):
            kind.step = bracket(step)
    return staticmethod(profile_hook_step)


def takes_part_of_steps(optimizer):
    """Whether its step lets each rank update some of the parameters, by an optimizer within it, and then
    hands them out: the flush comes after that, over all of them on all ranks."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


# What torch.optim marks its own such methods with: torch.compile traces neither these nor what they call.
@torch._disable_dynamo
def begin_step(optimizer, args, kwargs):
    steps = under_way.steps
    while steps and not steps[-1].is_bracketed and steps[-1].optimizer is optimizer:
        steps.pop()  # it raised
    if not steps or steps[-1].optimizer is not optimizer or steps[-1].has_begun:
        # A learning-rate scheduler that was made before the library was loaded calls the step that it found.
        steps.append(StepUnderWay(optimizer, is_bracketed=False))
    steps[-1].has_begun = True
    Process.set_in_step(True)


@torch._disable_dynamo
def end_step(optimizer, args, kwargs):
    """What follows a step, and not one that is a part of another."""
    steps = under_way.steps
    while steps[-1].optimizer is not optimizer:
        steps.pop()  # it raised
    *outer, step = steps
    if any(other.optimizer is optimizer for other in outer):
        # The class calls the step of its base class. torch runs the hooks for that one, too, if the process
        # has made an optimizer of the base class before, which other ranks may not have.
        return
    if not step.is_bracketed:
        under_way.end(step)
    Process.set_in_step(bool(outer))
    if any(takes_part_of_steps(other.optimizer) for other in outer):
        return
    if outer:
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for other in outer:
            other.taken.update(held)
    keep_states_plain(optimizer)
    flush_after_step(optimizer, step.taken)
    if of_package.roll_histories is not None:
        of_package.roll_histories(optimizer, step.taken)
    if of_package.agree_in_units is not None:
        of_package.agree_in_units(optimizer, step.taken)
    if of_package.take_samples is not None:
        of_package.take_samples()


def keep_states_plain(optimizer):
    """Some optimizers begin a state as a clone of the parameter (schedule-free's z, Prodigy's p0), which is quantized
    as the parameter is. It becomes a plain tensor of the same value, so that it costs no codes, no flush rounds it,
    and any PyTorch reads it from a checkpoint. torch's own optimizers begin with zeros."""
    if type(optimizer).__module__.startswith("torch.optim."):
        return
    for param, state in optimizer.state.items():
        for name, kept in state.items() if isinstance(state, dict) else ():
            local = local_of(kept)
            if holds_codes(local) and not is_view(local, local_of(param)):
                plain = plain_values(local)
                state[name] = plain if local is kept else with_local(plain, kept)


def plain_values(tensor):
    """What a checkpoint holds for this tensor."""
    return TensorState(tensor.detach()).export_view().clone()


def is_view(tensor, other):
    return tensor.untyped_storage()._cdata == other.untyped_storage()._cdata


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
        ops._flush_after_step(*with_groups(first), has_grad, found_inf, not synthetic_steps, told)
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
            if holds_codes(local):
                params.append((param, local))
                names.append(name)
    shards, groups = with_groups(params)
    for shard, number in zip(shards, groups):
        if number:
            TensorState(shard).set_groups(number)
    debug.check_written(shards, names, [param.grad is not None for param, _ in params])


call("torch.optim.optimizer:register_optimizer_step_pre_hook", begin_step)
call("torch.optim.optimizer:register_optimizer_step_post_hook", end_step)
