"""Gradients in one byte, or half of one, on the wire: under FSDP2 and under DDP.

A reduce-scatter becomes: quantize what each rank is to get into one message, an all-to-all of the
messages' bytes, and their sum in fp32, in the order of ranks. Format of a message:
kernels/messages/gradient_message.h.
"""

import hashlib
import math
import warnings
import weakref
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from qshard import module_state
from qshard._runtime.checkpoint import gradient_states

ops = torch.ops.qshard
FORMATS = ("float8", "mxfp8", "nvfp4")
_ROUNDINGS = ("nearest", "stochastic")
_BUFFER = "gradient_rounding"  # of a module whose gradients are rounded stochastically
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # parts of names that wrappers add


class Quantizer:
    """What makes messages of one stream of gradients. `rounding`: None for nearest even, else a
    function that gives the int32 tensor (key_low, key_high, count) of stochastic rounding."""

    def __init__(self, format: str, rounding: Callable[[], torch.Tensor] | None):
        self.format, self.rounding = format, rounding

    def __call__(self, values: torch.Tensor, chunks: int, chunk_numel: int) -> torch.Tensor:
        """(chunks, bytes): `values` as messages of `chunk_numel` values each, zeros after the last.
        Each counts once, and has random bits that no other rank has at that count."""
        if self.rounding is None:
            return ops.quantize_gradients(values, self.format, chunks, chunk_numel)
        state = self.rounding()
        messages = ops.quantize_gradients(
            values,
            self.format,
            chunks,
            chunk_numel,
            rounding=state.to(values.device),
            first_noise=dist.get_rank() * chunks * _round_up(chunk_numel, 16),
        )
        state[2] += 1
        return messages


class QuantizedReduceScatter(ReduceScatter):
    """FSDP2's reduction of one group of parameters, with messages of `format` on the wire."""

    def __init__(self, format: str, rounding: Callable[[], torch.Tensor] | None = None):
        self.format = format
        self.quantize = Quantizer(format, rounding)

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Work is ordered on the current stream, and the input's memory is used up."""
        world, numel = group.size(), output_tensor.numel()
        _check_dtype(input_tensor)
        factor = _factor(op, world)
        if input_tensor.numel() != world * numel:
            raise ValueError(
                f"qshard: a reduce-scatter of {input_tensor.numel()} gradients over {world} ranks "
                f"does not give {numel}"
            )
        if numel == 0:
            return
        messages = self.quantize(input_tensor, world, numel)
        # The input is not needed any more, and FSDP2 keeps it until the reduction is over: received
        # messages lie there, so that at no time there is more memory in use than without us.
        received = _empty_in(input_tensor, messages.shape, torch.uint8)
        dist.all_to_all_single(received.view(-1), messages.view(-1), group=group)
        ops.sum_gradients(received[None], self.format, numel, output_tensor, factor=factor)


class DDPHook:
    """A communication hook of DistributedDataParallel; see ddp_comm_hook()."""

    def __init__(self, format: str, rounding: str):
        _check_names("ddp_comm_hook", format, rounding)
        self.format = format
        self._state = _rounding_state("ddp") if rounding == "stochastic" else None
        self._quantize = Quantizer(format, None if self._state is None else self._on_device)
        self._device = torch.device("cpu")
        self._stream = None
        self.numels: dict[int, int] = {}  # of buckets, in the last step
        self.__name__ = self.__qualname__ = f"qshard_{format}"  # DDP logs it

    def __call__(self, group: dist.ProcessGroup | None, bucket: dist.GradBucket):
        """The mean of a bucket's gradients, the same bits on every rank."""
        group = group or dist.group.WORLD
        buffer = bucket.buffer()
        _check_dtype(buffer)
        self.numels[bucket.index()] = buffer.numel()
        self._device = buffer.device
        future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
        if group.size() == 1:
            _say_once("DDP on one rank reduces nothing")
            future.set_result(buffer)
            return future
        if not buffer.is_cuda:
            self._reduce(buffer, group)
            future.set_result(buffer)
            return future
        # A stream of our own, so that backward goes on meanwhile; the future is done when the stream is.
        if self._stream is None:
            self._stream = torch.cuda.Stream(buffer.device)
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(self._stream):
            self._reduce(buffer, group)
            future.set_result(buffer)
        return future

    def _reduce(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
        world = group.size()
        numel = _ddp_chunk(buffer.numel(), world)
        messages = self._quantize(buffer, world, numel)
        # The bucket is free until the mean comes back: what is received lies there, and the mean of
        # this rank's part after it, if there is room.
        received = _empty_in(buffer, messages.shape, torch.uint8)
        dist.all_to_all_single(received.view(-1), messages.view(-1), group=group)
        mean = _empty_in(_bytes_of(buffer)[received.numel() :], (numel,), torch.float32)
        ops.sum_gradients(received[None], self.format, numel, mean, factor=1 / world)
        message = self._quantize(mean, 1, numel)
        gathered = messages  # as many bytes, and sent by now
        dist.all_gather_into_tensor(gathered.view(-1), message.view(-1), group=group)
        ops.sum_gradients(gathered[:, None], self.format, numel, buffer)

    def _on_device(self) -> torch.Tensor:
        self._state = self._state.to(self._device)
        return self._state

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {} if self._state is None else {_BUFFER: self._state}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        if self._state is not None and _BUFFER in state_dict:
            self._state.copy_(state_dict[_BUFFER])


def reduce_gradients_(
    model: nn.Module,
    format: str | None,
    *,
    rounding: str = "nearest",
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> nn.Module:
    """Lets FSDP2 reduce a model's gradients in few bits, and returns the model.

    model: after `fully_shard`; its weights may be quantized or not.
    format: "float8" (1.008 bytes per gradient and peer), "mxfp8" (1.031), "nvfp4" (0.564), or None for
        stock FSDP2 again.
    rounding: "stochastic" rounds to the value on average, with bits of its own on every rank;
        torch.manual_seed reproduces it, and the modules' buffers `gradient_rounding` hold its count.
    filter_fn(module, name): which modules that `fully_shard` was called with; all by default.

    Gradients are quantized in what FSDP2 reduces (`reduce_dtype`), in blocks of the flat buffer it
    makes of a group's parameters, summed in fp32 in the order of ranks and rounded once. NaN and
    infinity arrive as NaN, and so does what shares their block. Between HSDP's replicas gradients travel
    as before. Call it on all ranks alike; nothing is changed by wrong arguments.

    Raises: ValueError for unknown names, if no sharded module was chosen, or, in backward and on every
    rank, for gradients that are not float32, bfloat16 or float16 and reductions other than sums.
    """
    if format is not None:
        _check_names("reduce_gradients_", format, rounding)
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "qshard.reduce_gradients_: of DistributedDataParallel, register a hook instead: "
            "model.register_comm_hook(None, qshard.ddp_comm_hook(format))"
        )
    owners = {owner for owner, _ in _owned_parameters(model)}
    chosen = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule)
        and module in owners
        and (filter_fn is None or filter_fn(module, name))
    ]
    if not chosen:
        raise ValueError(
            "qshard.reduce_gradients_: no module that fully_shard was called with was chosen; call it "
            "after fully_shard, and check filter_fn"
        )
    if format is not None and not any(map(_is_sharded, model.parameters())):
        _say_once("reduce_gradients_ does nothing: no parameter is sharded over several ranks")
        return model
    states = set()
    for name, module in chosen:
        _undo(module)
        # Modules of one fully_shard([a, b]) have one group of parameters, and one reduction.
        state = id(module._get_fsdp_state())
        if state in states:
            continue
        states.add(state)
        if format is not None:
            state = _ModuleRounding(module, name) if rounding == "stochastic" else None
            comm = QuantizedReduceScatter(format, state)
            module.set_custom_reduce_scatter(comm)
            module_state.of(module).gradient_reduction = comm
    return model


def ddp_comm_hook(format: str, *, rounding: str = "nearest") -> DDPHook:
    """A hook that lets DistributedDataParallel reduce its gradients in few bits:

    >>> model.register_comm_hook(None, qshard.ddp_comm_hook("float8"))

    The first argument may be the process group, else the default one. Formats and rounding as in
    `reduce_gradients_`. Gradients are quantized twice: before ranks sum their part of a bucket in fp32,
    and the mean, which they gather; all ranks have the same bits of it. The hook's state_dict() holds
    the count of stochastic rounding; load_state_dict() takes it back.
    """
    return DDPHook(format, rounding)


def message_bytes(format: str, numel: int) -> int:
    """Bytes of a message of so many gradients, padding included."""
    return ops.quantize_gradients(torch.empty(0, device="meta"), format, 1, numel).shape[1]


def ddp_message_bytes(format: str, numel: int, ranks: int) -> int:
    """Bytes that go to each rank for a bucket of DDP, before the sum and after it."""
    return message_bytes(format, _ddp_chunk(numel, ranks))


def _is_sharded(param: torch.Tensor) -> bool:
    return isinstance(param, DTensor) and any(
        size > 1 and not placement.is_replicate()
        for size, placement in zip(param.device_mesh.shape, param.placements)
    )


def _owned_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Each parameter with the module by which `fully_shard` owns it, the innermost around it."""

    def walk(module, owner):
        owner = module if isinstance(module, FSDPModule) else owner
        for param in module.parameters(recurse=False):
            yield owner, param
        for child in module.children():
            yield from walk(child, owner)

    return walk(model, None)


class _ModuleRounding:
    """The rounding state of a module's gradients, on their device, and a buffer of the module for its
    state_dict. What moves a module's buffers, or makes them anew out of nothing as `to_empty` does, does
    not touch the state: the buffer is linked to it whenever a state_dict is made or loaded."""

    def __init__(self, module: nn.Module, name: str):
        mesh = next(p.device_mesh for p in module.parameters() if isinstance(p, DTensor))
        device = torch.device(mesh.device_type)
        self.state = _rounding_state(name).to(device)
        gradient_states.append(weakref.ref(self.state, gradient_states.remove))
        self.hooks = [
            module.register_state_dict_pre_hook(self._link),
            module.register_load_state_dict_pre_hook(self._prepare_load),
            module.register_load_state_dict_post_hook(self._after_load),
        ]
        self._link(module)

    def __call__(self) -> torch.Tensor:
        return self.state

    def remove(self, module: nn.Module) -> None:
        for hook in self.hooks:
            hook.remove()
        delattr(module, _BUFFER)

    def _link(self, module, *_):
        module.register_buffer(_BUFFER, self.state)

    def _prepare_load(self, module, state_dict, prefix, *_):
        self._link(module)
        state_dict.setdefault(prefix + _BUFFER, self.state)  # checkpoints without one load, too

    def _after_load(self, module, *_):
        buffer = getattr(module, _BUFFER)
        if buffer is not self.state:  # assign=True
            self.state.copy_(buffer)
            self._link(module)


def _undo(module: nn.Module) -> None:
    state = module_state.find(module)
    comm = state.gradient_reduction
    if comm is None:
        return
    # FSDP2 has no public name for what it starts with.
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    module.set_custom_reduce_scatter(DefaultReduceScatter())
    if comm.quantize.rounding is not None:
        comm.quantize.rounding.remove(module)
    state.forget("gradient_reduction")
    module_state.remove_if_empty(module)


def _rounding_state(name: str) -> torch.Tensor:
    """(key_low, key_high, count) from torch's seed and a name."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    digest = hashlib.blake2b(f"{name}.{_BUFFER}".encode(), digest_size=8).digest()
    key = (torch.initial_seed() + int.from_bytes(digest, "little")) % 2**62
    return torch.tensor([key % 2**31, key >> 31, 0], dtype=torch.int32)


def _factor(op: dist.ReduceOp, world: int) -> float:
    """What a sum is multiplied by to give the reduction."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1 / world
    if op == dist.ReduceOp.PREMUL_SUM:
        return float(op.__getstate__()[1])
    raise ValueError(
        f"qshard: gradients in few bits are summed, not reduced by {op}; qshard.reduce_gradients_(model, "
        "None) goes back to plain reductions"
    )


def _check_dtype(gradients: torch.Tensor) -> None:
    if gradients.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"qshard: gradients of {gradients.dtype} cannot travel in few bits, only of float32, "
            "bfloat16 or float16; see MixedPrecisionPolicy(reduce_dtype=)"
        )


def _check_names(function: str, format: str, rounding: str) -> None:
    if format not in FORMATS:
        raise ValueError(
            f"qshard.{function}: gradients do not travel as {format!r}; known are {', '.join(FORMATS)}"
        )
    if rounding not in _ROUNDINGS:
        raise ValueError(
            f"qshard.{function}: rounding is {' or '.join(map(repr, _ROUNDINGS))}, got {rounding!r}"
        )


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(f"qshard: {text}", stacklevel=3)


_said: set[str] = set()


def _empty_in(used: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in the memory of one that is not needed any more, or in its own if that is too small."""
    free, nbytes = _bytes_of(used), math.prod(shape) * dtype.itemsize
    if free.numel() >= nbytes and free.data_ptr() % 16 == 0:
        return free[:nbytes].view(dtype).view(shape)
    return torch.empty(shape, dtype=dtype, device=used.device)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _ddp_chunk(numel: int, ranks: int) -> int:
    """Whole blocks, so that addresses are aligned; the last ranks' chunks of a bucket may be short."""
    return _round_up(-(-numel // ranks), 128)


def _round_up(a: int, b: int) -> int:
    return -(-a // b) * b
