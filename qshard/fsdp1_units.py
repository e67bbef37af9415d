"""A unit of FSDP1 whose weights are quantized at each use: what its ranks agree on, and its all-gather of
codes."""

import types
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from qshard import flat_parameters
from qshard.companies import all_reduce_max
from qshard.dynamic import DynamicWeight, Installed, update_state
from qshard.ranges import (
    Range,
    amax_of_ranges,
    dequantize_ranges,
    quantize_ranges,
    scale_inv_of_ranges,
)

_ALIGNMENT = 16
_BEFORE_STEPS = "prepare_gradient_for_optim"  # of a handle: called on all ranks, then those steps come


@dataclass
class _Weight:
    """A weight within a flat parameter: elements [start, start + rows x cols)."""

    dynamic: DynamicWeight
    start: int
    rows: int
    cols: int
    sends_codes: bool
    grid_numel: int
    index: int  # among the unit's parameters
    amax: torch.Tensor | None = None  # agreed on; of delayed scaling, what codes are scaled by
    scale_inv: torch.Tensor | None = None

    @property
    def end(self):
        return self.start + self.rows * self.cols

    def range_at(self, begin):
        """Its elements from `begin` of the flat parameter on."""
        return Range(self.dynamic.format, self.rows, self.cols, begin - self.start)


@dataclass
class _Piece:
    """Elements [begin, end) of the flat parameter in one message: of a weight whose codes are sent, or
    plain."""

    weight: _Weight | None
    begin: int
    end: int


@dataclass
class _Message:
    """What one rank sends: plain values, then codes from `codes` on."""

    pieces: list[_Piece] = field(default_factory=list)

    def plain(self):
        return [p for p in self.pieces if p.weight is None]

    def codes(self):
        return [p for p in self.pieces if p.weight is not None]

    def numel(self, pieces):
        return sum(p.end - p.begin for p in pieces)

    def codes_at(self, itemsize):
        return _round_up(self.numel(self.plain()) * itemsize, _ALIGNMENT)

    def nbytes(self, itemsize):
        return self.codes_at(itemsize) + self.numel(self.codes())

    def places(self, sent, dtype):
        """Of each plain piece and of each piece of codes, where it lies in the bytes that are sent."""
        plain, at = [], 0
        for piece in self.plain():
            end = at + (piece.end - piece.begin) * dtype.itemsize
            plain.append(sent[at:end].view(dtype))
            at = end
        codes, at = [], self.codes_at(dtype.itemsize)
        for piece in self.codes():
            end = at + piece.end - piece.begin
            codes.append(sent[at:end])
            at = end
        return plain, codes


class Unit:
    """One flat parameter. Its handle keeps it, as `_qshard_unit`."""

    def __init__(self, module, gather):
        self.module, self.handle = module, module._handle
        handle = self.handle
        self.flat = handle.flat_param
        self.group = handle.process_group
        # HYBRID_SHARD's replicas hold the same weights and see other activations.
        self.replicas = getattr(module, "_inter_node_pg", None)
        self.gather = gather
        self.shard_numel = flat_parameters.shard_numel(handle)
        self.is_sharded = flat_parameters.is_sharded(handle)
        self.rank = handle.rank if handle.uses_sharded_strategy else 0
        # FSDP1 has reduced its gradient, and steps the parameters that this rank has a part of.
        self.is_stepped_in_backward = False
        self.is_in_root_forward = False  # before which its ranks have met
        handle._qshard_unit = self
        if hasattr(type(handle), _BEFORE_STEPS):
            before_steps = types.MethodType(lambda handle: self._before_steps(handle), handle)
            setattr(handle, _BEFORE_STEPS, before_steps)
        self._set_up(self._dynamics())

    def _set_up(self, dynamics):
        """For the formats that its modules have at present."""
        self.dynamics, self._installed = dynamics, Installed.count
        self.weights = self._weights_of(dynamics)
        self.gathers_codes = any(w.sends_codes for w in self.weights)
        if self.gathers_codes:
            self.messages = [self._message(rank) for rank in range(self.handle.world_size)]
            self.handle._all_gather_flat_param = types.MethodType(
                lambda handle, out: self.all_gather(handle, out), self.handle
            )
        self.seen, self.own_amaxes = None, None

    def follow(self):
        """Sets it up anew if quantize_ or dequantize_ has given modules of it another format."""
        if self._installed == Installed.count:
            return
        dynamics, self._installed = self._dynamics(), Installed.count
        if [id(d) for _, d in dynamics] != [id(d) for _, d in self.dynamics]:
            self._take_down()
            self._set_up(dynamics)

    def _take_down(self):
        self.handle.__dict__.pop("_all_gather_flat_param", None)
        for weight in self.weights:
            weight.dynamic.managed, weight.dynamic.known_amax = False, []

    def remove(self):
        self._take_down()
        self.handle.__dict__.pop(_BEFORE_STEPS, None)
        del self.handle._qshard_unit

    def has_buffer_of_its_own(self):
        return self.is_sharded and self.handle._uses_param_mixed_precision

    def _dynamics(self):
        """(place, DynamicWeight) of the parameters that are quantized at each use."""
        places = [place for place in flat_parameters.places(self.flat) if place.numel]
        found = ((place, flat_parameters.dynamic_of(self.flat, place)) for place in places)
        return [(place, dynamic) for place, dynamic in found if dynamic is not None]

    def _weights_of(self, dynamics):
        may_send_codes = self.gather == "quantized" and self.has_buffer_of_its_own()
        found = []
        for place, dynamic in dynamics:
            sends_codes = may_send_codes and _is_same_when_quantized_again(dynamic)
            if sends_codes or dynamic.state:
                grid = _grid_numel(dynamic.format, place.shape)
                weight = _Weight(dynamic, place.start, *place.shape, sends_codes, grid, place.index)
                weight.dynamic.managed = True
                found.append(weight)
        return found

    # ------------------------------------------------------------------------- agreement

    def parameters(self):
        """What optimizers may hold of it."""
        return (self.flat, *(getattr(self.flat, "_params", None) or ()))

    def is_held(self, ids):
        return any(id(param) in ids for param in self.parameters())

    def is_stepped(self, weight, ids):
        """Whether the optimizer holds the weight, or the flat parameter that it is in, or the weight has
        stepped in backward."""
        if id(self.flat) in ids:
            return True
        params = getattr(self.flat, "_params", None) or ()
        if weight.index >= len(params):
            return False
        param = params[weight.index]
        return id(param) in ids or (self.is_stepped_in_backward and bool(optimizers_in_backward(param)))

    def _before_steps(self, handle):
        """Each rank steps other parameters, none perhaps: none of those steps is followed by a collective.
        Their unit is due on all ranks."""
        getattr(type(handle), _BEFORE_STEPS)(handle)
        self.is_stepped_in_backward = self.is_sharded and getattr(handle, "_has_optim_in_backward", False)

    def versions(self):
        """Of everything that a write may go through. They are what this rank has written: which ranks write
        and which do not, by `if p.grad is not None` say, no other rank knows."""
        tensors = (*self.parameters(), *(getattr(self.flat, "_shared_params", None) or ()))
        shard = getattr(self.flat, "_local_shard", None)  # FSDP1 makes it in the first forward
        return (*(t._version for t in tensors), 0 if shard is None else shard._version)

    def amaxes(self, are_kept):
        """Of what this rank has of the weights, one after the other. They are kept until a version moves, but
        not over a step: fused optimizers move none."""
        versions = self.versions()
        if self.own_amaxes is None or self.seen != versions or not are_kept:
            values, ranges = zip(*map(self.own_part, self.weights))
            self.own_amaxes, self.seen = amax_of_ranges(values, ranges), versions
        return self.own_amaxes

    def is_called_alone(self):
        """Whether a gather is neither of the root's forward, before which the ranks have met, nor of a
        backward, which reads what a forward has read."""
        state = getattr(getattr(self.handle, "_training_state", None), "name", "")
        return not (self.is_in_root_forward or is_in_backward() or state.startswith("BACKWARD"))

    def local_shard(self):
        return getattr(self.flat, "_local_shard", self.flat)

    def range_of(self, weight, rank):
        """The elements of a weight that a rank holds, counted in the flat parameter."""
        return flat_parameters.range_on(rank, self.shard_numel, weight.start, weight.end)

    def own_values(self, begin, end):
        first = self.rank * self.shard_numel
        return self.local_shard().detach()[begin - first : end - first]

    def own_part(self, weight):
        """This rank's values of a weight, and where they lie in it."""
        begin, end = self.range_of(weight, self.rank)
        values = _quantizable(self.own_values(begin, end))
        return values, weight.range_at(begin if begin < end else weight.start)

    # -------------------------------------------------------------------------- gathering

    def _message(self, rank):
        first = rank * self.shard_numel
        message, position, end = _Message(), first, first + self.shard_numel
        for weight in self.weights:
            if not weight.sends_codes:
                continue
            begin, stop = self.range_of(weight, rank)
            if begin == stop:
                continue
            if position < begin:
                message.pieces.append(_Piece(None, position, begin))
            message.pieces.append(_Piece(weight, begin, stop))
            position = stop
        if position < end:
            message.pieces.append(_Piece(None, position, end))
        return message

    def message_bytes(self, itemsize):
        """What each rank sends of codes, and of the rest in a dtype of that size."""
        return _round_up(max(m.nbytes(itemsize) for m in self.messages), _ALIGNMENT)

    @torch.no_grad()
    def all_gather(self, handle, out):
        """In place of FlatParamHandle._all_gather_flat_param: fills `out`, the padded unsharded flat
        parameter in the dtype of forward and backward."""
        is_full = handle._force_full_precision or getattr(handle, "_use_fake_all_gather", False)
        if not is_full and self.is_called_alone():
            agree([self], is_forward=True)
        sends_codes = self.gathers_codes and not is_full
        # Of whole values somebody may write some before they are read.
        for weight in self.weights:
            is_known = sends_codes and weight.sends_codes and not weight.dynamic.state
            weight.dynamic.known_amax = [weight.amax] if is_known else []
        if not sends_codes:
            return type(handle)._all_gather_flat_param(handle, out)
        nbytes = self.message_bytes(out.element_size())
        device = self.local_shard().device
        sent = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._write(sent, out.dtype)
        sent = sent.to(out.device)
        received = torch.empty(nbytes * handle.world_size, dtype=torch.uint8, device=out.device)
        dist.all_gather_into_tensor(received, sent, group=self.group)
        del sent
        self._read(received.view(handle.world_size, nbytes), out)
        return out

    def _write(self, sent, dtype):
        message = self.messages[self.rank]
        sent[message.nbytes(dtype.itemsize) :].zero_()
        sent[message.numel(message.plain()) * dtype.itemsize : message.codes_at(dtype.itemsize)].zero_()
        plain, codes = message.places(sent, dtype)
        if plain:
            values = [self.own_values(p.begin, p.end) for p in message.plain()]
            torch._foreach_copy_(plain, values)
        if codes:
            pieces = message.codes()
            values = [_quantizable(self.own_values(p.begin, p.end)) for p in pieces]
            amaxes = [p.weight.amax.to(sent.device) for p in pieces]
            quantize_ranges(values, [p.weight.range_at(p.begin) for p in pieces], amaxes, codes)

    def _read(self, received, out):
        plain, plain_out, pieces, codes = [], [], [], []
        for message, row in zip(self.messages, received):
            own_plain, own_codes = message.places(row, out.dtype)
            plain += own_plain
            plain_out += [out[p.begin : p.end] for p in message.plain()]
            codes += own_codes
            pieces += message.codes()
        if plain:
            torch._foreach_copy_(plain_out, plain)
        if codes:
            dequantize_ranges(
                codes,
                [p.weight.range_at(p.begin) for p in pieces],
                [p.weight.scale_inv for p in pieces],
                [out[p.begin : p.end] for p in pieces],
            )


def optimizers_in_backward(param):
    """Those that FSDP1 steps as soon as the parameter's gradient is reduced."""
    return getattr(param, "_in_backward_optimizers", ())


def _is_same_when_quantized_again(dynamic):
    """Whether the values that codes stand for, quantized once more, are the same: with scales that are
    powers of two, and with those of earlier steps."""
    if dynamic.state:
        return True
    return dynamic.format.partition("[")[0] in ("float8_tensorwise", "float8_blockwise")


def _quantizable(values):
    """fp64, which units with a lower param_dtype may keep, as fp32."""
    return values.float() if values.dtype == torch.float64 else values


def _grid_numel(format, shape):
    rows, cols = shape
    return -(-rows // 128) * -(-cols // 128) if format.startswith("float8_blockwise") else 1


def _round_up(a, b):
    return -(-a // b) * b


def is_in_backward():
    return torch._C._current_graph_task_id() != -1


@torch.no_grad()
def agree(units, stepped=(), found_inf=None, is_forward=False):
    """Brings amaxes and histories of units up to date. All ranks call it: where FSDP1 gathers, which ranks
    of a shard group do together, and after steps. Whether they meet is decided here, from that alone.

    Amaxes of values are agreed on by those that hold the other parts, each time: only a rank itself knows
    whether it has written. What histories collect is agreed on by all that a step is of.

    stepped: ids of the parameters that an optimizer step was of; the others' values were written
        otherwise, if at all. is_forward: before a forward, not after a step or a load."""
    meetings = {}
    for unit in units:
        unit.follow()
        if not unit.weights:
            continue
        is_step = bool(stepped) or unit.is_stepped_in_backward
        if is_step or unit.is_sharded:
            key = unit.group, unit.replicas if is_step else None, is_step, unit.local_shard().device
            meetings.setdefault(key, []).append(unit)
        elif not is_forward or unit.seen != unit.versions():  # whole, and the same on all ranks
            meetings.setdefault((None, None, False, unit), []).append(unit)
    for (group, replicas, is_step, _), members in meetings.items():
        weights = [(unit, weight) for unit in members for weight in unit.weights]
        delayed = [(unit, weight) for unit, weight in weights if weight.dynamic.state]
        are_kept = is_forward and not is_step
        words = torch.cat([u.amaxes(are_kept) for u in members]).to(members[0].handle.device)
        for _, weight in delayed:
            _move_state(weight.dynamic, words.device)
        numel = words.numel()
        if is_step and delayed:
            words = torch.cat([words, _collected(delayed, words.device)])
        if group is not None:
            all_reduce_max(words, [group])
        if replicas is not None and delayed:
            all_reduce_max(words, [replicas])
        _take_amaxes(weights, words)
        collected = words[numel:].view(-1, 3) if is_step else words.new_zeros(len(delayed), 3)
        _update_delayed(delayed, collected, stepped, found_inf)
        _take_scales([weight for _, weight in weights if weight.sends_codes])
    for unit in units:
        unit.is_stepped_in_backward = False


def _collected(delayed, device):
    """Three words of each weight with a history: what its linear saw of inputs and gradients, and whether
    backward reached it."""
    dynamics = [weight.dynamic for _, weight in delayed]
    activations = torch.stack([dynamic.state[0][1:, 0] for dynamic in dynamics])
    is_reached = torch.tensor([[float(dynamic.gradient.is_reached)] for dynamic in dynamics], device=device)
    return torch.cat([activations, is_reached], 1).view(-1)


def _take_amaxes(weights, words):
    """In place: a backward reads what holds for the codes that are gathered for it."""
    sizes = [weight.grid_numel for _, weight in weights]
    for _, weight in weights:
        if weight.amax is None or weight.amax.device != words.device:
            weight.amax = words.new_empty(weight.grid_numel)
    torch._foreach_copy_([weight.amax for _, weight in weights], words[: sum(sizes)].split(sizes))


def _take_scales(weights):
    if not weights:
        return
    amaxes = torch.cat([weight.amax for weight in weights])
    scales = scale_inv_of_ranges(amaxes, [weight.range_at(weight.start) for weight in weights])
    for weight, scale_inv in zip(weights, scales.split([weight.grid_numel for weight in weights])):
        weight.scale_inv = scale_inv


def _update_delayed(delayed, words, stepped, found_inf):
    """`words`: float32 (weights, 3), agreed on. Histories roll of what an optimizer step was of and backward
    had reached, on whatever rank. A rank that it reached need not wait for the answer of the others."""
    kinds = {}
    for i, (unit, weight) in enumerate(delayed):
        gradient, is_step = weight.dynamic.gradient, unit.is_stepped(weight, stepped)
        is_step = is_step and (gradient.is_reached or bool(words[i, 2]))
        if is_step:
            gradient.is_reached = False
        dtype = _quantizable(unit.own_values(0, 0)).dtype
        kinds.setdefault((is_step, dtype), []).append((i, weight))
    for (is_step, dtype), members in kinds.items():
        amax = torch.stack([torch.cat([weight.amax, words[i, :2]]) for i, weight in members])
        dynamics = [weight.dynamic for _, weight in members]
        update_state(dynamics, amax, dtype, is_step, found_inf if is_step else None)
        torch._foreach_copy_([weight.amax for _, weight in members], list(amax[:, :1]))


def _move_state(dynamic, device):
    if dynamic.state[0].device != device:
        dynamic.state = [t.to(device) for t in dynamic.state]
