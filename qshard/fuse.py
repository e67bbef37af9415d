"""fuse_: patterns of plain modules, as in Hugging Face's Llama, Mistral and Qwen, as fused steps."""

import functools
import inspect
import operator
import types
import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import fx
from torch import nn as torch_nn

from qshard.nn.activations import gate
from qshard.nn.norms import normalize
from qshard.nn.rotary import rotate
from qshard.nn.swiglu import swiglu_of_linears
from qshard.tensor_parallel.norms import norm_of_tokens

_FUNCTIONS = {
    "swiglu": F.silu,
    "geglu": functools.partial(F.gelu, approximate="tanh"),
    "reglu": F.relu,
    "glu": torch.sigmoid,
}


@dataclass(frozen=True)
class Fused:
    """A module that `fuse_` recognised."""

    name: str
    module: str  # its class
    pattern: str


class FusedReport(list):
    """A list of Fused; prints as a table."""

    def __str__(self) -> str:
        rows = [[row.name, row.module, row.pattern] for row in self]
        return tabulate(rows, headers=["module", "class", "fused"]) if rows else "nothing recognised"


def fuse_(model: torch_nn.Module) -> FusedReport:
    """Replaces what modules of known patterns compute by fused steps, in place, and says which it
    recognised. Parameters, submodules, names of state_dicts and hooks stay; classes become subclasses
    of what they were.

    Recognised, by what they compute, not by their names:

    - RMSNorm: one weight, `x / sqrt(mean(x^2) + eps) * weight`, or `* (1 + weight)`; nn.RMSNorm with an eps
      of its own. Computed in fp32 and rounded once, where modules in Python often round twice; backward
      keeps the input alone.
    - Gated MLP: `down(f(gate(x)) * up(x))` of three nn.Linear, f one of SiLU, GELU (tanh), ReLU, sigmoid.
      The same bits; backward keeps gate(x) and up(x), and not f(gate(x)). Of SiLU, where all three are
      quantized by one recipe and none has hooks, one operator (`qshard.ops.swiglu_mlp`).
    - Rotary embedding: a module without parameters, `forward(x, cos, sin)` of (batch, heads, positions,
      channels) and (positions, channels), that turns pairs half of the channels apart. One pass, in fp32
      and rounded once. Or a module whose forward calls such a function(q, k, cos, sin) of its file, with
      cos and sin of (1, positions, channels): where these are per sequence, of some of the channels or of
      another dtype than q, and in compiled code, the function itself.

    Call it before or after `quantize_`, and before fully_shard and torch.compile. Everything else is left
    as it is: modules whose forward was replaced on the instance, that compute something else in training
    than in evaluation, and, with a warning, whose activation has hooks.

    A norm's eps is read in each forward. Of an MLP whose activation is replaced, changed or given hooks
    later, its own forward runs again. Changes of what else a forward reads are not seen.
    """
    report = FusedReport()
    for name, module in list(model.named_modules()):
        if "forward" in module.__dict__ or isinstance(module, _Rebuilt):
            continue
        for recognise, mixin in _PATTERNS:
            found = recognise(module)
            if found is None:
                continue
            if _has_more(found.get("function")):
                warnings.warn(
                    f"qshard.fuse_: {name or 'the model'}, a {type(module).__name__}, is left as it is: its "
                    f"{found['attribute']} has hooks, or a forward of its own, which a fused step would "
                    "not call",
                    stacklevel=2,
                )
                break
            report.append(Fused(name, type(module).__name__, mixin.pattern.format(**found)))
            module._qshard_fused = found
            module.__class__ = _fused_class(mixin, type(module))
            break
    return report


class _Rebuilt:
    """Copies and pickles of a class that was made at run time."""

    def __reduce_ex__(self, protocol):
        return _rebuild, self._qshard_made_of, self.__dict__.copy()


class _FusedNorm(_Rebuilt):
    pattern = "RMSNorm, eps={eps}"

    def forward(self, x):
        known = self._qshard_fused
        eps = getattr(self, known["eps_name"])
        if not isinstance(eps, float):  # None of nn.RMSNorm's: that of the dtype
            return super().forward(x)
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        dtype = x.dtype if known["keeps_dtype"] else dtype

        def step(x, weight):
            return normalize(x, "RMSNorm", weight, None, eps, known["zero_centered"], dtype)

        return norm_of_tokens(step, x, self.weight)


class _FusedMLP(_Rebuilt):
    pattern = "{down}({activation} of {gate}, {up})"

    def forward(self, x):
        known = self._qshard_fused
        if not _is_as_it_was(self, known):
            return super().forward(x)
        first, second, last = (getattr(self, known[part]) for part in ("gate", "up", "down"))
        if known["activation"] == "swiglu":
            y = swiglu_of_linears(x, first, second, last)
            if y is not None:
                return y
        return last(gate(first(x), second(x), known["activation"]))


def _is_as_it_was(module, known):
    """Whether the activation of an MLP is the one that was recognised, and calling it does nothing else."""
    attribute, function = known["attribute"], known["function"]
    if attribute is None:  # the code's own
        return True
    now = module
    for name in attribute.split("."):
        now = getattr(now, name, None)
    if now is not function or _has_more(function):
        return False
    return all(_is_same(getattr(function, n, None), v) for n, v in known["settings"].items())


def _is_same(value, known):
    return value == known if isinstance(known, (bool, int, float, str)) else value is known


def _has_more(function):
    """Whether calling a module does more than its class says."""
    if not isinstance(function, torch_nn.Module):
        return False
    if "forward" in function.__dict__ or function._backward_hooks or function._backward_pre_hooks:
        return True
    return bool(function._forward_hooks or function._forward_pre_hooks)


class _FusedRotary(_Rebuilt):
    pattern = "rotary embedding"

    def forward(self, x, cos, sin):
        tables = (cos, sin)
        fits = x.dim() == 4 and all(t.dim() == 2 and t.dtype == torch.float32 for t in tables)
        fits = fits and not torch.compiler.is_compiling()  # which fuses the formula
        if fits and all(t.shape == (x.shape[2], x.shape[3]) for t in tables):
            return rotate(x, cos, sin, 2)
        return super().forward(x, cos, sin)


class _CallsFusedRotary(_Rebuilt):
    pattern = "rotary embedding, by {function}"

    def forward(self, *args, **kwargs):
        plain = _plain_class(type(self)).forward
        if torch.compiler.is_compiling():  # fuses the function's formula
            return plain(self, *args, **kwargs)
        return _calling_fused_rotary(plain, self._qshard_fused["function"])(self, *args, **kwargs)


@functools.cache
def _calling_fused_rotary(forward, name):
    """`forward`, which finds a fused function under the name of its rotary embedding's; its file's other
    names are those of the first call."""
    known = {**forward.__globals__, name: _fused_rotary_of(forward.__globals__[name])}
    made = types.FunctionType(
        forward.__code__, known, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _fused_rotary_of(function):
    @functools.wraps(function)
    def turn(q, k, cos, sin, *args, **kwargs):
        tensors = (q, k, cos, sin)
        fits = not args and not kwargs and all(type(t) is torch.Tensor for t in tensors)
        fits = fits and q.dim() == k.dim() == 4 and cos.shape == sin.shape == (1, *q.shape[2:])
        fits = fits and q.shape[2:] == k.shape[2:] and q.dtype == k.dtype
        if not fits or {torch.promote_types(q.dtype, t.dtype) for t in tensors} != {q.dtype}:
            return function(q, k, cos, sin, *args, **kwargs)
        cos, sin = cos[0].float(), sin[0].float()
        return rotate(q, cos, sin, 2), rotate(k, cos, sin, 2)

    return turn


def _plain_class(kind):
    """Of a class that fuse_ made: the module's own."""
    return kind._qshard_made_of[1]


@functools.cache
def _fused_class(mixin, kind):
    members = {"_qshard_made_of": (mixin, kind), "__module__": kind.__module__}
    return type(f"Fused{kind.__name__}", (mixin, kind), members)


def _rebuild(mixin, kind):
    cls = _fused_class(mixin, kind)
    return cls.__new__(cls)


# ----------------------------------------------------------------------------- recognition


def _rms_norm(module):
    """eps and the attribute that holds it, whether gamma is 1 + weight, and whether the result has the
    input's dtype."""
    if type(module) is torch_nn.RMSNorm:
        if not isinstance(module.eps, float) or module.weight is None or module.weight.dim() != 1:
            return None
        return {"eps": module.eps, "eps_name": "eps", "zero_centered": False, "keeps_dtype": True}
    if _is_known(module):
        return None
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or module.weight.dim() != 1:
        return None
    if any(map(list, (module.buffers(), module.children()))):
        return None
    epsilons = {n: v for n, v in vars(module).items() if isinstance(v, float) and 0 < v < 0.1}
    if len(set(epsilons.values())) != 1:
        return None
    return _in_both_modes(functools.partial(_rms_norm_by_values, module, epsilons))


def _rms_norm_by_values(module, epsilons, training):
    eps, size = next(iter(epsilons.values())), module.weight.shape[0]
    weight = torch.linspace(0.5, 1.5, size)
    # Rows to which eps means nothing, something, and everything.
    x = torch.linspace(-1, 2, size) * torch.tensor([[1.0], [eps**0.5], [1e-2 * eps**0.5]])
    run = functools.partial(_probe, module, training, _parameters={"weight": weight})
    y = run(x)
    if y is None or y.shape != x.shape or y.dtype != torch.float32:
        return None
    changed = {name: run(x, **{name: 4 * eps}) for name in epsilons}
    read = [name for name, other in changed.items() if other is None or not torch.equal(other, y)]
    if len(read) != 1:
        return None
    for zero_centered in (False, True):
        expected = normalize(x, "RMSNorm", weight, None, eps, zero_centered)
        if torch.allclose(y, expected, rtol=1e-5, atol=0):
            low = run(x.bfloat16())
            keeps = low is not None and low.dtype == torch.bfloat16
            return {"eps": eps, "eps_name": read[0], "zero_centered": zero_centered, "keeps_dtype": keeps}
    return None


def _in_both_modes(recognise):
    """recognise(training), if it is the same of both."""
    found = recognise(True)
    return found if found is not None and found == recognise(False) else None


def _is_known(module):
    """Whether torch or qshard made it: it computes what its name says."""
    return type(module).__module__.startswith(("torch.nn.", "qshard.nn"))


def _twin(module, training, **attributes):
    """The module in a mode, and its parts, without a change of the module: with attributes of its own."""
    twin = object.__new__(type(module))
    parts = {name: None if m is None else _twin(m, training) for name, m in module._modules.items()}
    twin.__dict__.update({**module.__dict__, "_modules": parts, "training": training, **attributes})
    return twin


@torch.no_grad()
def _probe(module, training, *inputs, **attributes):
    """What a module computes in a mode, with other attributes; without its hooks. None for an error."""
    try:
        with torch.random.fork_rng(devices=()):
            y = type(module).forward(_twin(module, training, **attributes), *inputs)
    except Exception:  # it is something else
        return None
    return y if isinstance(y, torch.Tensor) else None


def _rotary(module):
    """{} for a rotary embedding. What is run to find out says by its arguments that it may be one."""
    if _is_known(module) or any(map(list, (module.children(), module.parameters(), module.buffers()))):
        return None
    arguments = inspect.signature(type(module).forward).parameters
    if list(arguments)[-2:] != ["cos", "sin"] or len(arguments) != 4:
        return None
    x, cos, sin = _rotary_example()
    turned = (_probe(module, training, x, cos, sin) for training in (True, False))
    return {} if all(_is_turned(y, x, cos, sin) for y in turned) else None


def _rotary_function(module):
    """The name of the function of a rotary embedding that the module's forward calls."""
    forward = type(module).forward
    if _is_known(module) or not inspect.isfunction(forward) or hasattr(forward, "__wrapped__"):
        return None
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if inspect.isfunction(function) and _is_rotary_function(function):
            return {"function": name}
    return None


@functools.cache
@torch.no_grad()
def _is_rotary_function(function):
    """What is run to find out says by its arguments that it may be one."""
    arguments = list(inspect.signature(function).parameters.values())
    if [a.name for a in arguments[:4]] != ["q", "k", "cos", "sin"]:
        return False
    if any(a.default is a.empty and a.kind is not a.VAR_KEYWORD for a in arguments[4:]):
        return False
    q, cos, sin = _rotary_example()
    k = q[:, :1] + 1
    try:
        turned = function(q, k, cos[None], sin[None])
    except Exception:  # it is something else
        return False
    if not isinstance(turned, tuple) or len(turned) != 2:
        return False
    return _is_turned(turned[0], q, cos, sin) and _is_turned(turned[1], k, cos, sin)


def _rotary_example():
    """x (batch, heads, positions, channels), cos and sin (positions, channels)."""
    x = torch.linspace(-1, 2, 2 * 3 * 5 * 8, device="cpu").view(2, 3, 5, 8)
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.03], device="cpu")
    angles = torch.outer(torch.arange(5.0, device="cpu"), frequencies).repeat(1, 2)
    return x, angles.cos(), angles.sin()


def _is_turned(y, x, cos, sin):
    if not isinstance(y, torch.Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        return False
    return torch.allclose(y, rotate(x, cos, sin, 2), rtol=1e-5, atol=1e-6)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, module, name):
        return True


def _gated_mlp(module):
    """Names of the linears gate, up and down, the activation, and what the MLP calls it by."""
    linears = {n for n, m in module.named_children() if isinstance(m, torch_nn.Linear)}
    if len(linears) != 3 or len(list(module.parameters(recurse=False))):
        return None
    found = _in_both_modes(functools.partial(_traced_mlp, module, linears))
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
        module = _twin(module, training)
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
        y = _probe(function, module.training, t)
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


_PATTERNS = (
    (_rms_norm, _FusedNorm),
    (_gated_mlp, _FusedMLP),
    (_rotary, _FusedRotary),
    (_rotary_function, _CallsFusedRotary),
)
