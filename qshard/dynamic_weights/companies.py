"""Ranks that agree on amaxes of weights which stay plain, and when they meet for that: `ranks_meet`.

A `Company` is of whole weights. Every rank has the same values of these, so that after a meeting each brings its
histories up to date by itself. fsdp1_units.py has the units of FSDP1.
"""

import enum
import weakref

import torch

from qshard._runtime.classes import Process

ops = torch.ops.qshard

_NOTHING, _IS_HERE, _WAS_STEPPED = 0, 1, 2  # what a rank knows of a weight that its group meets for


class Occasion(enum.Enum):
    """What brings amaxes and histories up to date. All ranks come to the first three."""

    STEP = "a step of an optimizer that holds one of the weights"
    OTHER_STEP = "a step of an optimizer that holds none of the weights, and perhaps copies of them"
    FLUSH = "qshard.flush"
    VALUES = "values that no step made: before a use, a gather or a state dict, after a load or a write"


def ranks_meet(occasion: Occasion, *, is_cut: bool = False, is_behind: bool = False) -> bool:
    """Whether the ranks that agree on weights meet now. It is decided here alone, from what all of them know;
    one that waits for another which does not come would wait for ever.

    is_cut: each rank has a part of the values, and only it knows whether it wrote that. Whole values are the
        same on all ranks, and one may use, or gather from, what it has alone.
    is_behind: a step may have been of the weights since the ranks met for one: an optimizer in backward, which
        steps other pieces on each rank, or one of copies, after the weights were used in training."""
    if occasion is Occasion.VALUES:
        return is_cut or is_behind
    return is_behind if occasion is Occasion.OTHER_STEP else True


def _device_of(group):
    """Where a group's ranks meet: by what the group can reduce, since the weights may be gone on one of them."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kinds = {device.type for device in group._device_types}
    return accelerator if accelerator is not None and accelerator.type in kinds else torch.device("cpu")


class StepsTold:
    """Whether an optimizer has stepped a weight itself, which outlives the weight: each rank's Python frees
    that at a time of its own, and whether ranks meet must not follow from it."""

    is_told = False


class Company:
    """The weights of delayed scaling that agree with one tuple of groups, in the order in which all ranks
    made them.

    members: weak references. A place is kept until the weight is gone on all ranks, since each rank's
        Python frees it at a time of its own.
    trained: the StepsTold of those that a forward which records gradients, or a backward, has used since the
        ranks last met. They tell a step of these weights' copies from a step of another model, on all ranks
        alike.
    found_inf: of the step that they met for.
    """

    def __init__(self, groups, resolved):
        self.groups = groups
        self.number = Process.number_of_groups("", list(groups), [], [])
        self.resolved = [weakref.ref(group) for group in resolved]
        self.members = []
        self.trained, self.found_inf = set(), None
        self._is_behind = False

    def exists(self):
        """Whether its groups do. destroy_process_group leaves weights that were trained, and their names
        are given to other groups, so groups are told apart by identity."""
        return all(
            group() is not None and group() is _resolve(name)
            for name, group in zip(self.groups, self.resolved)
        )

    def take_to_refresh(self):
        """The weights at the first use of any since the ranks met, else none. All are brought up to date
        then, of the same values on all ranks, whichever each of them uses."""
        if not self._is_behind:
            return []
        self._is_behind = False
        return [dynamic for dynamic in (reference() for reference in self.members) if dynamic is not None]

    def meet_after_step(self, found_inf):
        """After a step of an optimizer that holds none of the weights, but may hold their copies: agrees on
        what the step collected. The weights are written afterwards."""
        is_behind = not all(steps.is_told for steps in self.trained)
        if not ranks_meet(Occasion.OTHER_STEP, is_behind=is_behind):
            return
        self.trained.clear()
        here = [reference() for reference in self.members]
        levels = [_NOTHING if d is None else _WAS_STEPPED if d._is_used else _IS_HERE for d in here]
        agreed = self._agree(here, levels, found_inf)
        self.members = [m for m, level in zip(self.members, agreed) if level != _NOTHING]

    def meet_in_flush(self, members, found_inf):
        """`members`: (DynamicWeight, whether this rank has yet to roll its history), of one model. A rank
        that has rolled it, in an evaluation of its own, has nothing to add."""
        levels = [_WAS_STEPPED if is_behind else _NOTHING for _, is_behind in members]
        self._agree([d if is_behind else None for d, is_behind in members], levels, found_inf)

    def _agree(self, members, levels, found_inf):
        """Agrees on what histories of members, or None, have collected; returns the largest level of each on
        any rank."""
        if not self.exists():
            raise RuntimeError(
                "qshard.flush: the process group that the ranks of these weights agree over was destroyed; call "
                'qshard.quantize_(..., weights="dynamic", group=...) again with one that exists'
            )
        nothing, device = torch.empty(0), _device_of(self.resolved[0]())
        histories = [nothing if dynamic is None else dynamic.state[0] for dynamic in members]
        agreed = ops._agree_on_histories(histories, levels, self.number, device)
        self.found_inf, self._is_behind = found_inf, True
        for dynamic, level in zip(members, agreed):
            if dynamic is not None and level == _WAS_STEPPED:
                dynamic._is_used = dynamic.is_due = True
        return agreed


_companies: list[Company] = []


def _resolve(name):
    try:
        return torch._C._distributed_c10d._resolve_process_group(name)
    except RuntimeError:  # no group has the name
        return None


def _alive() -> list[Company]:
    _companies[:] = [company for company in _companies if company.exists()]
    return _companies


def of(groups, dynamic) -> Company:
    """The company of these groups, which the weight joins."""
    resolved = [_resolve(name) for name in groups]
    for company in _alive():
        if [group() for group in company.resolved] == resolved:
            break
    else:
        company = Company(groups, resolved)
        _companies.append(company)
    if all(reference() is not dynamic for reference in company.members):
        company.members.append(weakref.ref(dynamic))
    return company


def have_trained() -> bool:
    """Whether weights of any company, which may be gone by now, were used since their ranks last met."""
    return any(company.trained for company in _companies)


def meet_after_step(found_inf) -> None:
    for company in list(_alive()):
        company.meet_after_step(found_inf)
