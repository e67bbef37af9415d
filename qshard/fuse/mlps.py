"""Gated MLPs."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from qshard.fuse.part import Part, Reason, operands_of
from qshard.nn.parts.activations import activate, gate
from qshard.nn.parts.known_activations import gated_name, has_more, name_now
from qshard.nn.swiglu import swiglu_of_linears


class _Gated(Part):
    """What GatedMLP and PackedMLP share.

    activation: what the code calls. A string is the name of the module's attribute that holds
        it."""

    activation: str | Callable

    def _held(self, module):
        name = self.activation
        return getattr(module, name, None) if isinstance(name, str) else name

    def reason(self, module):
        held = self._held(module)
        if has_more(held):
            return Reason(
                f"its {self.activation} has hooks, or a forward of its own, which a fused step "
                "would not call",
                warns=True,
            )
        return None if gated_name(held) else Reason(f"its activation, {_said(held)}, is not known")

    def _gated_name(self, module):
        """Or None where the activation has to be called, or is another."""
        return name_now(self._held(module))


def _said(activation):
    return getattr(activation, "__name__", None) or str(activation)


@dataclass(frozen=True)
class GatedMLP(_Gated):
    """Modules that compute `down(f(gate(x)) * up(x))` by three linears. Fused they give the same
    bits; backward keeps gate(x) and up(x), and not f(gate(x)). For all but sigmoid, where all three
    are quantized by one recipe and none has hooks, they are one operator (`qshard.ops.swiglu_mlp`).

    gate, up, down: the attributes that hold the linears.
    activation: f, one of SiLU, GELU (tanh), ReLU and sigmoid: the function that the code calls, as
        `torch.nn.functional.silu`, or the name of the attribute that holds it, a function or a
        module. The attribute is read in each forward: while it holds another, or has hooks, the
        plain forward runs.
    """

    gate: str
    up: str
    down: str
    activation: str | Callable

    def describe(self, module):
        name = gated_name(self._held(module))
        return f"{self.down}({name} of {self.gate}, {self.up})"

    def forward(self, cls):
        plain, names, run = cls.forward, self.names(cls), self.run

        @functools.wraps(plain)
        def forward(self, *args, **kwargs):
            operands = operands_of(names, args, kwargs)
            y = None if operands is None else run(self, *operands)
            return plain(self, *args, **kwargs) if y is None else y

        return forward

    def run(self, module, x):
        name = self._gated_name(module)
        if name is None:
            return None
        first, second, last = (getattr(module, part) for part in (self.gate, self.up, self.down))
        y = swiglu_of_linears(x, first, second, last, name)
        return last(gate(first(x), second(x), name)) if y is None else y


@dataclass(frozen=True)
class PackedMLP(_Gated):
    """Modules that compute `down(f(first) * second)`, first and second the halves of `gate_up(x)`.
    Fused they give the same bits, and backward keeps gate_up(x) alone. activation: as of
    GatedMLP."""

    gate_up: str
    down: str
    activation: str | Callable

    def describe(self, module):
        return f"{self.down}({gated_name(self._held(module))} of {self.gate_up})"

    def forward(self, cls):
        plain, names, run = cls.forward, self.names(cls), self.run

        @functools.wraps(plain)
        def forward(self, *args, **kwargs):
            operands = operands_of(names, args, kwargs)
            y = None if operands is None else run(self, *operands)
            return plain(self, *args, **kwargs) if y is None else y

        return forward

    def run(self, module, x):
        name = self._gated_name(module)
        if name is None:
            return None
        first, last = getattr(module, self.gate_up), getattr(module, self.down)
        return last(activate(first(x), name))
