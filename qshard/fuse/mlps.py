"""Gated MLPs of plain modules."""

import functools
import operator

import torch
import torch.nn.functional as F
from torch import fx
from torch import nn as torch_nn

from qshard.fuse.classes import Rebuilt, has_more
from qshard.fuse.probing import in_both_modes, probe, twin
from qshard.fuse.projections import Projections
from qshard.nn.activations import gate
from qshard.nn.normed import linears_of_norm, swiglu_of_norm
from qshard.nn.swiglu import swiglu_of_linears

_FUNCTIONS = {
    "swiglu": F.silu,
    "geglu": functools.partial(F.gelu, approximate="tanh"),
    "reglu": F.relu,
    "glu": torch.sigmoid,
}


class FusedMLP(Rebuilt):
    pattern = "{down}({activation} of {gate}, {up})"

    def forward(self, x):
        known = self._qshard_fused
        if isinstance(x, Projections):
            return self._qshard_of_projections(x.outputs, known)
        if not _is_as_it_was(self, known):
            return super().forward(x)
        first, second, last = self._qshard_parts()
        if known["activation"] == "swiglu":
            y = swiglu_of_linears(x, first, second, last)
            if y is not None:
                return y
        return last(gate(first(x), second(x), known["activation"]))

    def _qshard_parts(self):
        known = self._qshard_fused
        return [getattr(self, known[part]) for part in ("gate", "up", "down")]

    def _qshard_project(self, x, norm, linears):
        """What forward takes in place of norm(x), or None. norm: what `normalize` takes after x. linears: the names
        of gate and up."""
        known = self._qshard_fused
        if not _is_as_it_was(self, known):
            return None
        first, second, last = self._qshard_parts()
        if known["activation"] == "swiglu":
            y = swiglu_of_norm(x, norm, first, second, last)
            if y is not None:
                return Projections(x, {known["down"]: y})
        outputs = linears_of_norm(x, norm, (first, second))
        return None if outputs is None else Projections(x, dict(zip(linears, outputs)))

    def _qshard_of_projections(self, outputs, known):
        if known["down"] in outputs:
            return outputs[known["down"]]
        first, second = outputs[known["gate"]], outputs[known["up"]]
        return getattr(self, known["down"])(gate(first, second, known["activation"]))


def _is_as_it_was(module, known):
    """Whether the activation of an MLP is the one that was recognised, and calling it does nothing else."""
    attribute, function = known["attribute"], known["function"]
    if attribute is None:  # the code's own
        return True
    now = module
    for name in attribute.split("."):
        now = getattr(now, name, None)
    if now is not function or has_more(function):
        return False
    return all(_is_same(getattr(function, n, None), v) for n, v in known["settings"].items())


def _is_same(value, known):
    return value == known if isinstance(known, (bool, int, float, str)) else value is known


class _Tracer(fx.Tracer):
    def is_leaf_module(self, module, name):
        return True


def gated_mlp(module):
    """Names of the linears gate, up and down, the activation, and what the MLP calls it by."""
    linears = {n for n, m in module.named_children() if isinstance(m, torch_nn.Linear)}
    if len(linears) != 3 or len(list(module.parameters(recurse=False))):
        return None
    found = in_both_modes(functools.partial(_traced_mlp, module, linears))
    if found is None:
        return None
    attribute = found["attribute"]
    is_module = attribute is not None and attribute not in vars(module)
    function = module.get_submodule(attribute) if is_module else vars(module).get(attribute)
    settings = vars(function).items() if is_module else ()
    settings = {n: v for n, v in settings if n[0] != "_" and n != "training"}
    return {**found, "function": function, "settings": settings}


def _traced_mlp(module, linears, training):
    try:
        module = twin(module, training)
        nodes = list(_Tracer().trace(module).nodes)
    except Exception:  # control flow, other arguments: it is something else
        return None
    if [node.op for node in nodes].count("placeholder") != 1 or len(nodes) != 7:
        return None
    x, output = nodes[0], nodes[-1]

    def called(node, argument=None):
        """The module that a node calls, of one argument."""
        is_call = isinstance(node, fx.Node) and node.op == "call_module" and len(node.args) == 1
        is_call = is_call and not node.kwargs and (argument is None or node.args[0] is argument)
        return node.target if is_call else None

    down = called(output.args[0])
    product = output.args[0].args[0] if down in linears else None
    if product is None or product.op != "call_function" or len(product.args) != 2:
        return None
    if product.target not in (operator.mul, torch.mul) or product.kwargs:
        return None
    for activated, other in (product.args, product.args[::-1]):
        up = called(other, x)
        act = activated.args[0] if isinstance(activated, fx.Node) and activated.args else None
        first, activation = called(act, x), _activation(module, activated)
        if up in linears and first in linears and activation and len({up, first, down}) == 3:
            return {"gate": first, "up": up, "down": down, **activation}
    return None


def _activation(module, node):
    """The gated activation that a node applies the function of, and the attribute of the module that holds
    that, or None."""
    if not isinstance(node, fx.Node) or len(node.args) != 1:
        return None
    t = torch.linspace(-8, 8, 97)
    if node.op == "call_module":
        function, attribute = module.get_submodule(node.target), node.target
        if any(map(list, (function.parameters(), function.buffers(), function.children()))):
            return None
        y = probe(function, module.training, t)
    elif node.op == "call_function":
        # As it is, or as a functools.partial.
        held = (n for n, f in vars(module).items() if getattr(f, "func", f) is node.target)
        attribute = next(held, None)
        try:
            y = node.target(t, **node.kwargs)
        except Exception:  # it is something else
            return None
    else:
        return None
    same = (n for n, f in _FUNCTIONS.items() if isinstance(y, torch.Tensor) and torch.equal(f(t), y))
    name = next(same, None)
    return None if name is None else {"activation": name, "attribute": attribute}
