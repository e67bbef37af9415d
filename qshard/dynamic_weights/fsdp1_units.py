"""A unit of FSDP1 whose weights are quantized at each use: what its ranks agree on, and its all-gather of
codes."""

import types
from dataclasses import dataclass

import torch
import torch.distributed as dist

from qshard._runtime.classes import Process
from qshard.dynamic_weights import flat_parameters
from qshard.dynamic_weights.companies import Occasion, ranks_meet
from qshard.dynamic_weights.weights import HELD, NO_STEP, REACHED, STEP, DynamicWeight, Installed
from qshard.formats import info_of

ops = torch.ops.qshard

_BEFORE_STEPS = "prepare_gradient_for_optim"  # of a handle: called on all ranks, then those steps come


@dataclass
class _Weight:
    """A weight within a flat parameter."""

    dynamic: DynamicWeight
    place: flat_parameters.Place
    sends_codes: bool
    own: torch.Tensor  # amaxes of what this rank has
    amax: torch.Tensor  # agreed on; of delayed scaling, what codes are scaled by


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
        self.has_pieces = self.is_sharded and handle._use_orig_params
        self.rank = handle.rank if handle.uses_sharded_strategy else 0
        replicas = [] if self.replicas is None else [self.replicas.group_name]
        self.groups = Process.number_of_groups(self.group.group_name, [], replicas, [])
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
        self.seen = None  # versions of what this rank's amaxes are of
        self.sent = [weight for weight in self.weights if weight.sends_codes]
        self.gathers_codes = bool(self.sent)
        if self.gathers_codes:
            self.handle._all_gather_flat_param = types.MethodType(
                lambda handle, out: self.all_gather(handle, out), self.handle
            )

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
                like = ops.quantize(torch.empty(place.shape, device="meta"), dynamic.format)
                own, amax = torch.zeros(2, ops.scale_inv(like).numel(), device=self.handle.device)
                found.append(_Weight(dynamic, place, sends_codes, own, amax))
                dynamic.managed = True
        return found

    # ------------------------------------------------------------------------- agreement

    def parameters(self):
        """What optimizers may hold of it."""
        return (self.flat, *(getattr(self.flat, "_params", None) or ()))

    def is_held(self, ids):
        return bool(ids) and any(id(param) in ids for param in self.parameters())

    def is_stepped(self, weight, ids):
        """Whether the optimizer holds the weight, or the flat parameter that it is in, or the weight has
        stepped in backward."""
        if id(self.flat) in ids:
            return True
        params = getattr(self.flat, "_params", None) or ()
        if weight.place.index >= len(params):
            return False
        param = params[weight.place.index]
        return id(param) in ids or (self.is_stepped_in_backward and bool(optimizers_in_backward(param)))

    def _before_steps(self, handle):
        """Each rank steps other parameters, none perhaps: none of those steps is followed by a collective.
        Their unit is due on all ranks."""
        getattr(type(handle), _BEFORE_STEPS)(handle)
        self.is_stepped_in_backward = self.is_sharded and getattr(handle, "_has_optim_in_backward", False)

    def versions(self):
        """The versions of all tensors that a write may go through. They show what this rank has written: other
        ranks may have skipped that write, as by `if p.grad is not None`."""
        tensors = (*self.parameters(), *(getattr(self.flat, "_shared_params", None) or ()))
        shard = getattr(self.flat, "_local_shard", None)  # FSDP1 makes it in the first forward
        return (*(t._version for t in tensors), 0 if shard is None else shard._version)

    def is_known(self, held):
        """Whether this rank's amaxes are those of its values: until a version moves, but not over a step of
        parameters that it holds, as fused optimizers move none."""
        is_stepped = self.is_stepped_in_backward or self.is_held(held)
        return not is_stepped and self.seen == self.versions()

    def own_parts(self):
        """This rank's values of each weight, and where they begin in it."""
        shard, first = self.local_shard().detach(), self.rank * self.shard_numel
        places = [weight.place for weight in self.weights]
        ranges = [flat_parameters.range_on(self.rank, self.shard_numel, p.start, p.end) for p in places]
        values = [shard[begin - first : end - first] for begin, end in ranges]
        starts = [begin - p.start if begin < end else 0 for p, (begin, end) in zip(places, ranges)]
        return values, starts

    def steps(self, held):
        """What this rank knows of a step of each weight. A rank whose optimizer leaves out pieces without
        elements may have reached what another steps."""
        for weight in self.weights:
            is_held = weight.dynamic.state and self.is_stepped(weight, held)
            is_reached = weight.dynamic.gradient.is_reached
            yield STEP | (HELD if is_held else 0) | (REACHED if is_reached else 0)

    def is_called_alone(self):
        """Whether a gather is neither of the root's forward, before which the ranks have met, nor of a
        backward, which reads what a forward has read."""
        state = getattr(getattr(self.handle, "_training_state", None), "name", "")
        return not (self.is_in_root_forward or is_in_backward() or state.startswith("BACKWARD"))

    def local_shard(self):
        return getattr(self.flat, "_local_shard", self.flat)

    # -------------------------------------------------------------------------- gathering

    def _message(self, shard, dtype):
        return ops._write_message(
            shard, self.rank, self.handle.world_size, *self._sent_ranges(),
            [weight.amax.to(shard.device) for weight in self.sent], dtype,
        )

    def _sent_ranges(self):
        geometry = [number for w in self.sent for number in (*w.place.shape, w.place.start)]
        return [weight.dynamic.format for weight in self.sent], geometry

    def message_bytes(self, dtype):
        """What each rank sends of codes, and of the rest in that dtype."""
        return self._message(torch.empty(self.shard_numel, device="meta"), dtype).numel()

    @torch.no_grad()
    def all_gather(self, handle, out):
        """In place of FlatParamHandle._all_gather_flat_param: fills `out`, the padded unsharded flat
        parameter in the dtype of forward and backward."""
        is_full = handle._force_full_precision or getattr(handle, "_use_fake_all_gather", False)
        if not is_full and self.is_called_alone():
            agree([self])
        sends_codes = self.gathers_codes and not is_full
        # A caller may write to whole values before they are read.
        for weight in self.weights:
            is_known = sends_codes and weight.sends_codes and not weight.dynamic.state
            weight.dynamic.known_amax = [weight.amax] if is_known else []
        if not sends_codes:
            return type(handle)._all_gather_flat_param(handle, out)
        sent = self._message(self.local_shard().detach(), out.dtype).to(out.device)
        received = sent.new_empty(handle.world_size, sent.numel())
        dist.all_gather_into_tensor(received.view(-1), sent, group=self.group)
        del sent
        amaxes = [weight.amax.to(out.device) for weight in self.sent]
        ops._read_messages(received, *self._sent_ranges(), amaxes, out)
        return out


def optimizers_in_backward(param):
    """Those that FSDP1 steps as soon as the parameter's gradient is reduced."""
    return getattr(param, "_in_backward_optimizers", ())


def _is_same_when_quantized_again(dynamic):
    """Whether the values that codes stand for, quantized once more, are the same: with scales that are
    powers of two, and with those of earlier steps. Messages of ranges have scales in the grid alone."""
    if dynamic.state:
        return True
    scale = info_of(dynamic.format).scale
    return scale.power_of_two and scale.place == "grid"


def is_in_backward():
    return torch._C._current_graph_task_id() != -1


@torch.no_grad()
def agree(units, occasion=Occasion.VALUES, held=(), found_inf=None):
    """Brings amaxes and histories of units up to date. All ranks call it: where FSDP1 gathers, which ranks
    of a shard group do together, and after steps.

    Amaxes of values are agreed on by those that hold the other parts, each time. What histories collect is
    agreed on by all that a step is of.

    held: ids of the parameters that an optimizer which has stepped holds on this rank; the others' values were
        written otherwise, if at all."""
    changed, weights, values, starts, are_known, steps, groups = [], [], [], [], [], [], []
    for unit in units:
        unit.follow()
        is_step = occasion is Occasion.STEP or unit.is_stepped_in_backward
        meets = ranks_meet(occasion, is_cut=unit.is_sharded, is_behind=unit.is_stepped_in_backward)
        is_known = unit.is_known(held)
        # What is whole has the same values on all ranks.
        if not unit.weights or (is_known and not meets):
            continue
        numel = len(unit.weights)
        weights += unit.weights
        if is_known:
            own = [torch.empty(0, dtype=unit.local_shard().dtype)] * numel, [0] * numel
        else:
            own = unit.own_parts()
            changed.append(unit)
        values += own[0]
        starts += own[1]
        are_known += [is_known] * numel
        steps += unit.steps(held) if is_step else [NO_STEP] * numel
        groups += [unit.groups if meets else 0] * numel
    if weights:
        for weight in weights:
            weight.dynamic.move_state(weight.amax.device)
        is_stepped = ops._agree_on_ranges(
            values,
            [weight.dynamic.format for weight in weights],
            [number for w, start in zip(weights, starts) for number in (*w.place.shape, start)],
            [weight.own for weight in weights],
            are_known,
            [weight.amax for weight in weights],
            [table for weight in weights for table in weight.dynamic.state],
            steps,
            groups,
            found_inf,
        )
        for weight, is_step in zip(weights, is_stepped):
            if is_step:
                weight.dynamic.gradient.is_reached = False
    for unit in changed:
        unit.seen = unit.versions()
    for unit in units:
        unit.is_stepped_in_backward = False
