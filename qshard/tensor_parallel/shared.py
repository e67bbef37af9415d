"""The input of several linears (q/k/v, gate/up) is gathered once, and so quantized once.

Each linear makes a tensor of its own of what it is given: by a collective, or as the local part of a
DTensor. What was made last is remembered with its owner, the tensor that they all were given.

Nothing here refers to the owner, weakly or by its address: the tensor itself keeps a mark
(kernels/tensors/kept_with_tensor.h), which dies with it.
"""

import threading
import weakref

import torch

from qshard._runtime.classes import Process
from qshard._runtime.library import keep_with, kept_with


class Slot:
    """One tensor of a thread's forward: it lives on until its owner dies, another takes its place, or
    backward begins, which may run in another thread."""

    def __init__(self):
        self.last = None  # (weak reference to the owner's mark, key, tensor), replaced as one

    def forget(self):
        self.last = None


class _Mark:
    """The mark of a tensor whose thread remembers what was made of it."""


class _Slots(threading.local):
    def __init__(self):
        self.slot = Slot()


_slots = _Slots()


def current_slot() -> Slot:
    """This thread's."""
    return _slots.slot


def shared(owner: torch.Tensor, key: tuple, make):
    """make(), or what it made of this owner before: an activation of eager training that nothing wrote
    since. `key`: what else make() depends on."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or owner.grad_fn is None:
        return make()
    key = (*key, owner.grad_fn, owner._version, torch.is_autocast_enabled(owner.device.type))
    slot = _slots.slot
    last = slot.last
    if last is not None and last[1] == key and (mark := last[0]()) and kept_with(owner) is mark:
        return last[2]
    slot.forget()
    made = make()
    if owner._version == 0 and Process.shares_input_codes(made) and keep_with((owner, mark := _Mark())):

        def owner_is_gone(reference):
            if slot.last is not None and slot.last[0] is reference:
                slot.forget()

        slot.last = weakref.ref(mark, owner_is_gone), key, made
    return made
