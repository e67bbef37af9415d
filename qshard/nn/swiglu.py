"""Three linears of a gated MLP as one operator, where nothing stands between them."""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from qshard.modules.calls import does_forward_alone
from qshard.nn.linear import Linear
from qshard.nn.parts.activations import OF_OPERATOR
from qshard.nn.parts.fused import swiglu_mlp
from qshard.nn.parts.multiply import Multiply
from qshard.tensor_parallel.local import check_can_be_read


def swiglu_of_linears(x: Tensor, gate: Linear, up: Linear, down: Linear, activation: str = "swiglu") -> Tensor | None:
    """down(f(gate(x)) * up(x)), or None where each linear has to run by itself: where no operator has the
    activation, they multiply in different ways, have hooks or a forward of their own, a weight that other
    modules use, or parts on other ranks that no style of qshard.tensor_parallel put there."""
    if activation not in OF_OPERATOR:
        return None
    linears = (gate, up, down)
    multiply = multiply_of(linears)
    if multiply is None:
        return None
    dynamics = [linear._qshard.dynamic for linear in linears]
    if all(dynamic is not None for dynamic in dynamics):
        for dynamic, linear in zip(dynamics, linears):
            dynamic.prepare(linear, linear.weight)
        parts = ((linear.weight, linear.bias) for linear in linears)
        return swiglu_mlp(x, multiply, *parts, [dynamic.scaling for dynamic in dynamics], activation=activation)
    if any(dynamic is not None for dynamic in dynamics):
        return None
    if all(linear._qshard.style is None for linear in linears):
        if any(isinstance(linear.weight, DTensor) for linear in linears):
            return None
        return swiglu_mlp(x, multiply, *((linear.weight, linear.bias) for linear in linears), activation=activation)
    if not _styles_meet(gate, up, down):
        return None
    check_can_be_read([linear.weight for linear in linears])
    x = gate._qshard.style.enter(gate, x)
    down._qshard.parallel.check_output(x)
    parts = (l._qshard.parallel.local(l.weight, l.bias) for l in linears)
    y = swiglu_mlp(x, multiply, *parts, activation=activation)
    return down._qshard.style.leave(down, y)


def multiply_of(linears: Sequence[Linear]) -> Multiply | None:
    """How linears multiply that run by operators, in one way, with nothing around them but styles."""
    if not all(map(_is_usual, linears)):
        return None
    ways = [(l._qshard.weight_only, l._qshard.weight_format) for l in linears]
    if any(way != ways[0] for way in ways):
        return None
    multiply = Multiply(*ways[0])
    return multiply if multiply.runs_operators else None


def _is_usual(linear):
    """Whether calling it is its operator alone, or that between the hooks of its style."""
    if not isinstance(linear, Linear) or linear.is_constructed:
        return False
    state = linear._qshard
    if state.dynamic is not None and (state.dynamic.uses > 1 or state.dynamic.forward_precision):
        return False
    return does_forward_alone(linear, 0 if state.style is None else state.style.hooks)


def _styles_meet(gate, up, down):
    """Whether what passes between the linears are local tensors, cut by features."""
    gate, up, down = (linear._qshard for linear in (gate, up, down))
    if any(state.style is None or state.parallel is None for state in (gate, up, down)):
        return False
    is_column_and_row = gate.parallel.mode == "column" and down.parallel.mode == "row"
    is_local = gate.style.gives_local_features and down.style.takes_local_features
    is_one_mesh = gate.style.mesh == down.style.mesh
    return is_column_and_row and is_local and is_one_mesh and gate.style.is_like(up.style)
