"""Checkpoints hold plain tensors; pickles and deep copies hold exact planes.

DCP asks a DTensor's local tensor for the shard it may write or fill (torch/distributed/tensor/
_api.py: __get_tensor_shard__): it gets the master, or an export view that decays to plain values.
"""

import copy
import copyreg
import functools
import inspect
import sys

import torch
from torch.utils._pytree import tree_leaves

from qshard._runtime.classes import TensorState
from qshard._runtime.hooks import (
    holds_codes,
    local_of,
    plain_values,
    synthetic_steps,
    tensor_property,
    with_groups,
)
from qshard._runtime.patches import call, put, put_item, wrap

# Files written earlier find them in this module, by its name then, `_qshard_checkpoint`.
from qshard._runtime.unpickling import rebuild_shared, rebuild_tensor

ops = torch.ops.qshard


# ------------------------------------------------------------------------------------------ DCP


@tensor_property("__get_tensor_shard__")
def get_tensor_shard(self):
    def shard(index):
        master = ops.master(self.detach())
        return TensorState(self.detach()).export_view() if master is None else master

    return shard


@wrap("torch.distributed.tensor._api:DTensor.__create_chunk_list__")
def see_loads(stock):
    """DCP calls DTensor.__create_chunk_list__ on every rank when it plans a load, and only then. An
    in-place load writes nothing on ranks without rows, yet they must take part in the flush that
    follows. Looking the method up does nothing."""

    def __create_chunk_list__(self):
        chunks = stock(self)
        if holds_codes(self._local_tensor):
            ops._mark_written(self._local_tensor)
        return chunks

    __create_chunk_list__.__doc__ = stock.__doc__
    return __create_chunk_list__


@wrap("torch.distributed.checkpoint._state_dict_stager:StateDictStager._offload_tensor")
def stage_as_plain_values(stock):
    """Async saves copy tensors through data_ptr(), which there is none of without a master."""

    def _offload_tensor(self, x, memo, non_blocking=False):
        if not holds_codes(x) or TensorState(x).keeps_master():
            return stock(self, x, memo, non_blocking=non_blocking)
        staged = plain_values(x).to("cpu", copy=True)
        memo[id(x)] = staged
        return staged

    return _offload_tensor


# Weak references to the states by which gradients are rounded (qshard/gradients.py).
gradient_states = []


def state_names(state_dict):
    """Names of what qshard adds to the state_dict of a model: <weight>_<state> beside quantized weights
    that have such state (qshard/model/state_buffers.py), and gradient_states. It names no other library's
    entries, whatever they are called."""
    states = [state for reference in gradient_states if (state := reference()) is not None]
    storages = {state.untyped_storage()._cdata for state in states}
    names = set()
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            continue
        local = local_of(value)
        is_gradient_state = local.dtype == torch.int32 and not holds_codes(local)
        if is_gradient_state and local.untyped_storage()._cdata in storages:
            names.add(name)
            continue
        # In a state_dict a weight's master stands for it.
        about = TensorState(local)
        state = about.scaling_state() if holds_codes(local) else about.state_names_of_master()
        names.update(f"{name}_{part}" for part in state)
    return names


@wrap("torch.distributed.checkpoint.default_planner:create_default_local_load_plan")
def load_without_state(stock):
    """A checkpoint of a plain model, or of one in another format, has no such state; the model loads
    without it. Any other key that a checkpoint lacks is an error as ever."""

    def create_default_local_load_plan(state_dict, metadata, strict=True):
        missing = state_dict.keys() - metadata.state_dict_metadata.keys()
        if missing:
            missing &= state_names(state_dict)
            state_dict = {n: value for n, value in state_dict.items() if n not in missing}
        return stock(state_dict, metadata, strict)

    return create_default_local_load_plan


@wrap("torch.distributed.checkpoint.state_dict_loader:_load_state_dict")
def flush_after_loads(stock):
    """Where the ranks of a tensor-parallel model read weights next, none could flush its part alone, and
    no gather flushes them; a load is what all of them take part in."""
    arguments = inspect.signature(stock)

    @functools.wraps(stock)
    def _load_state_dict(*args, **kwargs):
        given = arguments.bind(*args, **kwargs).arguments
        result = stock(*args, **kwargs)
        if not given.get("no_dist", False):
            flush_parts(tree_leaves(given["state_dict"]))
        return result

    return _load_state_dict


def flush_parts(tensors):
    """Flushes the parts of full tensors among these, in their order, which is that of all ranks."""
    shards = [
        (tensor, local)
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
        and holds_codes(local := local_of(tensor))
        and local is not tensor
    ]
    if not shards:
        return
    parts = []
    for local, number in zip(*with_groups(shards)):
        local = local.detach()
        state = TensorState(local)
        if number:
            state.set_groups(number)
        if state.groups():
            parts.append(local)
    if parts:
        ops.flush(parts)


@wrap("torch.distributed.checkpoint.state_dict:_init_optim_state")
def mark_made_up_steps(stock):
    """To have optimizer states that it can load into, DCP steps with zero gradients and lr 0: that
    step moves no history and no count."""

    def _init_optim_state(*args, **kwargs):
        synthetic_steps.append(True)
        try:
            return stock(*args, **kwargs)
        finally:
            synthetic_steps.pop()

    return _init_optim_state


# ------------------------------------------------------------------------------------------ FSDP1


@wrap("torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel.__init__")
def refuse_quantized_parameters(stock):
    """FSDP1 flattens parameters into plain ones: it would leave quantized ones behind without a word, or
    fail without saying why."""

    @functools.wraps(stock)
    def __init__(self, module, *args, **kwargs):
        ignored = set()
        for name in ("ignored_modules", "ignored_states"):
            if kwargs.get(name) is not None:
                kwargs[name] = list(kwargs[name])  # it may be an iterator
            for thing in kwargs.get(name) or ():
                is_module = isinstance(thing, torch.nn.Module)
                ignored.update(map(id, thing.parameters() if is_module else (thing,)))
        for name, parameter in module.named_parameters():
            if id(parameter) not in ignored and holds_codes(local_of(parameter)):
                raise TypeError(
                    f"qshard: {name} is a quantized parameter, and FullyShardedDataParallel flattens "
                    'parameters; call qshard.quantize_(model, recipe, weights="dynamic") instead and, '
                    "after wrapping, qshard.prepare_for_fsdp1(model), or use fully_shard (FSDP2)"
                )
        stock(self, module, *args, **kwargs)

    return __init__


# ------------------------------------------------------------------------------------------ transformers


@wrap("transformers.modeling_utils:PreTrainedModel.get_memory_footprint")
def count_codes(stock):
    """get_memory_footprint() multiplies elements by the size of their dtype, which for a quantized weight is
    its value's."""

    @functools.wraps(stock)
    def get_memory_footprint(self, *args, **kwargs):
        return stock(self, *args, **kwargs) + sum(map(bytes_beside_values, self.parameters()))

    return get_memory_footprint


def bytes_beside_values(parameter):
    """What a quantized parameter occupies, whole, beyond its values' bytes; below 0 without a master."""
    local = local_of(parameter)
    if not holds_codes(local):
        return 0
    whole = torch.empty(parameter.shape, dtype=local.dtype, device="meta")
    twin = ops.quantize(whole, ops.format(local), keep_master=TensorState(local).keeps_master())
    return TensorState(twin).storage_bytes()["storage"] - whole.nbytes


# -------------------------------------------------------------------------- pickle, deepcopy, ...


def reduce_tensor(tensor):
    data, pending, layout, format, state = TensorState(tensor.detach()).pack()
    return rebuild_tensor, (
        data,
        pending,
        list(layout),
        format,
        list(tensor.shape),
        list(tensor.stride()),
        tensor.storage_offset(),
        tensor.dtype,
        list(state),
        tensor.requires_grad,
    )


def wrap_method(name):
    """Replaces torch.Tensor.<name> by `wrapped(stock, self, ...)` for quantized tensors only."""

    def make(wrapped, stock):
        def method(self, *args, **kwargs):
            if holds_codes(self):
                return wrapped(stock, self, *args, **kwargs)
            return stock(self, *args, **kwargs)

        method.__name__ = name
        method.__doc__ = stock.__doc__
        # ShardedTensor finds what it does for deepcopy by the method that it found when it was imported.
        api = sys.modules.get("torch.distributed._shard.sharded_tensor.api")
        known = getattr(api, "_SHARDED_OPS", {})
        if stock in known:
            put_item("torch.distributed._shard.sharded_tensor.api:_SHARDED_OPS", method, known[stock])
        return method

    def install(wrapped):
        wrap(f"torch:Tensor.{name}")(functools.partial(make, wrapped))
        return wrapped

    return install


@wrap_method("_reduce_ex_internal")
def _reduce_ex_internal(stock, self, proto):
    if TensorState(self).is_export():
        return stock(plain_values(self), proto)
    return reduce_tensor(self)


@wrap_method("__deepcopy__")
def __deepcopy__(stock, self, memo):
    # The stock way copies the storage, which is not all of a quantized tensor. As there, tensors of
    # one storage are copied to tensors of one storage.
    if id(self) in memo or not self.is_leaf:
        return stock(self, memo)
    buffer = ("qshard", self.untyped_storage()._cdata)
    if buffer not in memo:
        memo[buffer] = TensorState(self.detach()).copy_buffer()
        TensorState(memo[buffer]).set_replicas("")  # those of DTensors are known from their meshes
    result = memo[buffer].as_strided(self.shape, self.stride(), self.storage_offset())
    memo[id(self)] = result.requires_grad_(self.requires_grad)
    if self.grad is not None:
        result.grad = copy.deepcopy(self.grad, memo)
    result.__dict__ = copy.deepcopy(self.__dict__, memo)
    return result


def __copy__(self):
    """copy.copy shares the memory, as of a plain tensor: the stock way, pickling, would copy it."""
    if not holds_codes(self):
        reduce = copyreg.dispatch_table.get(type(self))
        return copy._reconstruct(self, None, *(reduce(self) if reduce else self.__reduce_ex__(4)))
    result = self.detach()
    if self.is_inference():  # the copy is one only if it is made in inference mode
        result = self.new_empty([]).set_(result)
    if type(self) is not torch.Tensor:  # a kind of Parameter, whose constructor may want more
        result = torch.Tensor._make_subclass(type(self), result)
    result.requires_grad_(self.requires_grad)
    result.__dict__.update(self.__dict__)
    return result


put("torch:Tensor.__copy__", __copy__)


@wrap_method("tolist")
def tolist(stock, self):
    # tolist(), and with it print(), reads memory directly.
    return plain_values(self).tolist()


def of_plain_tensor(stock, self, *args, **kwargs):
    # These look up a device by dispatch key (trunc_normal_ and LBFGS call them).
    return stock(torch.empty(0, dtype=self.dtype, device=self.device), *args, **kwargs)


wrap_method("new")(of_plain_tensor)
wrap_method("new_tensor")(of_plain_tensor)


@wrap_method("storage")
def storage(stock, self):
    if TensorState(self).keeps_master():
        return stock(self)
    # A typed storage would show codes as if they were values.
    raise TypeError(
        "torch.Tensor.storage() is not supported on quantized tensors without a master: their bytes "
        "are codes and scales. Use untyped_storage(), or qshard::dequantize(tensor)"
    )


@wrap_method("share_memory_")
def share_memory_(stock, self):
    # All planes move, not the tensor's storage alone.
    for plane in shared_planes(self)[:3]:
        if plane is not None:
            plane.share_memory_()
    return self


def shared_planes(tensor):
    """The tensor's memory itself, as plain tensors, and what describes it."""
    return TensorState(tensor.detach()).shared_planes()


def register_forking_reducers():
    """Queues, DataLoader workers and spawned processes: as of a plain tensor, the memory is shared.
    What one process writes the others see in the value; codes follow where it was written, and
    elsewhere after qshard.mark_written(tensor)."""
    from torch.multiprocessing.reductions import reduce_tensor as reduce_plain_tensor

    def reduce_shared(tensor):
        if not holds_codes(tensor):
            return reduce_plain_tensor(tensor)
        detached = tensor.detach()
        return rebuild_shared, (
            type(tensor),
            *shared_planes(detached),
            list(tensor.shape),
            list(tensor.stride()),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.requires_grad,
        )

    for tensor_type in (torch.Tensor, torch.nn.Parameter):
        call("multiprocessing.reduction:ForkingPickler.register", tensor_type, reduce_shared)


register_forking_reducers()
