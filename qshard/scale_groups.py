"""Weights with one tensor scale: those that inference engines run as one linear.

Which ones they are is in their modules, where copies and pickles of the model keep it. The weights
themselves hold a number for it, by which a flush that meets all of them knows them.
"""

import itertools

import torch
from _qshard_hooks import is_quantized, local_of
from torch import nn as torch_nn

from qshard import module_state

ops = torch.ops.qshard

# Of one parent and one input; the names of Hugging Face's models, and of Llama's own.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("wq", "wk", "wv"),
    ("w1", "w3"),
)
_ids = itertools.count(1)


class ScaleGroup:
    """One object for all modules of a group. Its number is this process's: copies get another."""

    def __init__(self, members: int):
        self.members = members
        self.id = next(_ids)

    def __getstate__(self):
        return {"members": self.members}

    def __setstate__(self, state):
        self.__init__(state["members"])


def siblings(named: dict, fused=FUSED) -> list[list]:
    """Of {module's name: what it has}, lists of those whose modules have one parent and are named
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
    if not (format.startswith("nvfp4") or format.startswith("float8_tensorwise")):
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


def put(groups: list[list[torch_nn.Module]]) -> None:
    for group in groups:
        token = ScaleGroup(len(group))
        for module in group:
            module_state.of(module).scale_group = token


def forget(module: torch_nn.Module) -> None:
    state = module_state.find(module)
    if state is not None:
        state.forget("scale_group")


def has_any(module: torch_nn.Module) -> bool:
    return _group_of(module) is not None


def _group_of(module):
    state = module_state.find(module)
    return None if state is None else state.scale_group


def link(module: torch_nn.Module, weight=None) -> None:
    """Tells the module's weight, or the one that is about to be it, its group."""
    token = _group_of(module)
    if token is None:
        return
    local = local_of(module.weight if weight is None else weight)
    if is_quantized(local):
        ops._share_tensor_scale(local, token.id, token.members)
