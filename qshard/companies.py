"""Ranks that agree on amaxes of weights which stay plain, and when they meet for that.

They meet in optimizer steps and in `qshard.flush`, which all of them make, and never in a use of a weight,
which one may make alone. Every rank has the same values of these weights, so that after a meeting each
brings its histories up to date by itself.
"""

import weakref

import torch
import torch.distributed as dist


def all_reduce_max(values, groups):
    """The largest over groups, in place, of floats that are not negative: by their bits, so that NaN is
    the largest on every backend."""
    for group in groups:
        if isinstance(group, str):
            group = torch._C._distributed_c10d._resolve_process_group(group)
        dist.all_reduce(values.view(torch.int32), op=dist.ReduceOp.MAX, group=group)


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
        self.resolved = [weakref.ref(group) for group in resolved]
        self.members = []
        self.trained, self.found_inf = set(), None
        self._is_behind = False
        self._due = weakref.WeakSet()  # whose amaxes are agreed on, and whose histories have yet to roll

    def is_due(self, dynamic):
        return dynamic in self._due

    def rolled(self, dynamic):
        self._due.discard(dynamic)

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
        if all(steps.is_told for steps in self.trained):
            return
        self.trained.clear()
        here = [reference() for reference in self.members]
        words = self._agreed([(d, d is not None and d._is_used, True) for d in here], found_inf)
        if None in here:
            is_somewhere = words[:, 3].tolist()
            self.members = [m for m, is_kept in zip(self.members, is_somewhere) if is_kept]

    def meet_in_flush(self, members, found_inf):
        """`members`: (DynamicWeight, whether this rank has yet to roll its history), of one model. A rank
        that has rolled it, in an evaluation of its own, has nothing to add."""
        self._agreed([(d, is_behind, is_behind) for d, is_behind in members], found_inf)

    def _agreed(self, members, found_inf):
        """`members`: (DynamicWeight or None, whether a step was of it, whether its words count)."""
        groups = [group() for group in self.resolved]
        if None in groups:
            raise RuntimeError(
                "qshard.flush: the process group that the ranks of these weights agree over was destroyed; call "
                'qshard.quantize_(..., weights="dynamic", group=...) again with one that exists'
            )
        device = _device_of(groups[0])
        nothing = torch.zeros(4, device=device)
        rows = []
        for dynamic, is_stepped, counts in members:
            if dynamic is None or not counts:
                rows.append(nothing)
                continue
            flags = torch.tensor([float(is_stepped), 1.0], device=device)
            rows.append(torch.cat([dynamic.state[0][1:, 0].to(device), flags]))
        words = torch.stack(rows)
        all_reduce_max(words, groups)
        self.found_inf, self._is_behind = found_inf, True
        for i, (dynamic, is_stepped, counts) in enumerate(members):
            if dynamic is None or not counts:
                continue
            dynamic.state[0][1:, 0].copy_(words[i, :2])
            if is_stepped or bool(words[i, 2]):  # a rank that knows need not wait for the answer
                dynamic._is_used = True
                self._due.add(dynamic)
        return words


_companies: list[Company] = []


def _resolve(name):
    try:
        return torch._C._distributed_c10d._resolve_process_group(name)
    except RuntimeError:  # no group has the name
        return None


def _alive() -> list[Company]:
    """Those whose groups exist. destroy_process_group leaves weights that were trained, and their names are
    given to other groups, so groups are told apart by identity."""
    _companies[:] = [
        c for c in _companies
        if all(group() is not None and group() is _resolve(name) for name, group in zip(c.groups, c.resolved))
    ]
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
