"""Weights with one tensor scale: those that inference engines run as one linear.

Which ones they are is in their modules, where copies and pickles of the model keep it. The weights
themselves hold a number for it, by which a flush that meets all of them knows them; those of copies
hold another.
"""

import itertools
import weakref

import torch
from torch import nn as torch_nn

from qshard import module_state
from qshard._runtime.classes import TensorState
from qshard._runtime.hooks import holds_codes, local_of
from qshard.formats import info_of

ops = torch.ops.qshard

# Siblings that read one input, by the names of Hugging Face's models, and of Llama's own.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("wq", "wk", "wv"),
    ("w1", "w3"),
)
_ids = itertools.count(1)


class ScaleGroup:
    """One object for all modules of a group. Its number is this process's: copies get another.

    memberships: those that live in modules."""

    def __init__(self, members: int):
        self.members = members
        self.id = next(_ids)
        self.memberships = weakref.WeakSet()

    def __getstate__(self):
        return {"members": self.members}

    def __setstate__(self, state):
        self.__init__(state["members"])


class Membership:
    """A module's place in a group, kept in its `__dict__`. Copies and pickles of the module make it after
    the module's parameters, and it then tells the copied weight its group.

    parameters: the module's. Its weight may be replaced, and is not held."""

    def __init__(self, group: ScaleGroup, parameters: dict):
        self.group, self.parameters = group, parameters
        group.memberships.add(self)

    def __getstate__(self):
        return {"group": self.group, "parameters": self.parameters}

    def __setstate__(self, state):
        self.__init__(state["group"], state["parameters"])
        self.link()

    def link(self, weight=None) -> None:
        """Tells the weight, or the one that is about to be it."""
        weight = self.parameters.get("weight") if weight is None else weight
        local = local_of(weight)
        if isinstance(local, torch.Tensor) and holds_codes(local):
            TensorState(local).share_tensor_scale(self.group.id, self.group.members)

    def leave(self) -> None:
        """The others go on as a smaller group, by the scale that they have until one is written."""
        group = self.group
        group.memberships.discard(self)
        group.members -= 1
        for other in list(group.memberships) if group.members > 1 else ():
            other.link()


def siblings(named: dict, fused=FUSED) -> list[list]:
    """Lists of the values of `named` ({module's name: value}) whose modules have one parent and are named
    together in `fused`; two at least."""
    groups = []
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in named):
        for names in fused:
            members = [named.get(f"{parent}.{name}".lstrip(".")) for name in names]
            members = [member for member in members if member is not None]
            if len(members) > 1:
                groups.append(members)
    return groups


def find(chosen, fused, format: str) -> list[list[torch_nn.Module]]:
    """The groups among `chosen`, pairs of names and modules. Raises ValueError for a format without a
    scale to share and where nothing is named so."""
    info = info_of(format)
    if not info.has_tensor_scale or info.amax_history is not None:
        raise ValueError(
            f"qshard.quantize_: share_tensor_scale is for NVFP4BlockScaling and Float8CurrentScaling; "
            f"weights in {format} have no tensor scale of their present values"
        )
    fused = FUSED if fused is True else tuple(tuple(names) for names in fused)
    linears = {name: module for name, module in chosen if isinstance(module, torch_nn.Linear)}
    groups = []
    for group in siblings(linears, fused):
        of_one_input = len({module.weight.shape[-1] for module in group}) == 1
        if of_one_input and len({id(module.weight) for module in group}) == len(group):
            groups.append(group)
    if not groups:
        raise ValueError(
            "qshard.quantize_: share_tensor_scale found no linears of one parent and one input with "
            f"names among {', '.join('/'.join(names) for names in fused)}; give the names that are "
            'fused, as [("query", "key", "value")]'
        )
    return groups


def regroup(chosen, groups: list[list[torch_nn.Module]], format: str) -> None:
    """Before `chosen` modules are quantized in a format: makes `groups` of them. Members of earlier groups
    leave if they are quantized in another format; quantized again in the same one, they stay, unless a whole group
    is quantized anew without being asked for."""
    anew = {id(module) for members in groups for module in members}
    here = {of(module) for _, module in chosen} - {None}
    whole = {group for group in (m.group for m in here) if here.issuperset(group.memberships)}
    for _, module in chosen:
        membership = of(module)
        if membership is None:
            continue
        local = local_of(module.weight)
        is_same = holds_codes(local) and ops.format(local) == format
        if membership.group in whole or not is_same or id(module) in anew:
            forget(module)
    for members in groups:
        group = ScaleGroup(len(members))
        for module in members:
            module_state.of(module).scale_group = Membership(group, module._parameters)


def of(module: torch_nn.Module) -> Membership | None:
    state = module_state.find(module)
    if isinstance(state.scale_group, ScaleGroup):  # of a pickle that knew no memberships
        state.scale_group = Membership(state.scale_group, module._parameters)
    return state.scale_group


def forget(module: torch_nn.Module) -> None:
    membership = of(module)
    if membership is not None:
        module_state.find(module).forget("scale_group")
        membership.leave()


def link(module: torch_nn.Module, weight=None) -> None:
    """Tells the module's weight, or the one that is about to be it, its group."""
    membership = of(module)
    if membership is not None:
        membership.link(weight)
