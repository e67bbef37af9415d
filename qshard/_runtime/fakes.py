"""What traced calls may know of a quantized tensor, and flop formulas.

FakeTensor describes a quantized tensor as a plain strided one of its nominal dtype: the format, and
with it the shapes of codes and scales, is not in it. But a FakeTensorMode remembers which real
tensor it made a fake from, and `quantize` leaves a note with its own result. Where the real tensor,
or the note, is known, a traced call answers as the real one would; elsewhere it says that it cannot.
"""

import functools
import math

import torch
from torch._guards import CompileContext, TracingContext
from torch._higher_order_ops import effects
from torch._subclasses.fake_tensor import FakeTensor, UnsupportedOperatorException
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.library import register_fake, register_torch_dispatch
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import register_flop_formula
from torch.utils.weak import WeakIdKeyDictionary

from qshard._runtime.classes import TensorState
from qshard._runtime.library import has_key
from qshard._runtime.patches import wrap

ops = torch.ops.qshard


class OutsideGraphs(UnsupportedOperatorException):
    """Makes torch.compile run the operator outside the graph, on the real tensor; with
    fullgraph=True, and elsewhere, it is an error."""

    def __init__(self, op, why):
        super().__init__(op)
        self.why = why

    def __str__(self):
        return f"{self.func.name()}: {self.why}"


def run_really(op, *args, **kwargs):
    """The operator's own kernel, on meta tensors that are quantized or plain in earnest."""
    with no_dispatch():
        return op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def meta_replica(tensor):
    with no_dispatch():
        return TensorState(tensor).meta_replica()


# ------------------------------------------------------------------------- what is behind a fake

# A quantized meta tensor of the whole buffer, by the storage of the fakes that stand for it.
twins = WeakIdKeyDictionary()


def storage_of(fake):
    return fake.untyped_storage() if fake.layout is torch.strided else None


def noted_twin(fake):
    """The twin that was noted when `quantize` was traced, or None."""
    storage = storage_of(fake)
    return None if storage is None else twins.get(storage)


def tensors_behind(fake):
    """The real tensors that this fake, or else one it shares its storage with, was made from."""
    try:
        converter = fake.fake_mode.fake_tensor_converter
        known, ids = converter.tensor_memo, converter.meta_converter.describer.lookup_tensor
    except AttributeError:  # private names of torch's: without them nothing is known
        return []
    # The mode remembers its own results too, by the meta tensors that they were made from.
    made_from = [
        (known[id], real)
        for real, id in list(ids.items())
        if id in known and real.device == fake.device
    ]
    direct = [real for other, real in made_from if other is fake]
    storage = storage_of(fake)
    return direct or [
        real for other, real in made_from if storage is not None and storage_of(other) is storage
    ]


def is_behind(fake, op):
    """Whether a quantized tensor is behind the fake."""
    if noted_twin(fake) is not None:
        return True
    answers = {run_really(ops.is_quantized.default, tensor) for tensor in tensors_behind(fake)}
    if len(answers) != 1 or (fake.device.type == "meta" and answers == {False}):
        raise OutsideGraphs(
            op,
            "a fake tensor that a traced operator returned does not say whether the real one is "
            "quantized; ask outside the traced code (torch.compiler.disable)",
        )
    return answers.pop()


def window_of_twin(fake, op):
    """The meta tensor that has all that the tensor behind the fake has, but for its bytes. Sizes of
    the fake that are symbols become constants: where a scale lies depends on all of them."""
    if not is_behind(fake, op):
        with no_dispatch():  # a plain tensor: the operator names what is wrong
            return torch.empty(0, dtype=fake.dtype, device="meta")
    twin = noted_twin(fake)
    if twin is None:
        if TracingContext.try_get() is not None:
            raise OutsideGraphs(
                op,
                "a compiled graph would serve weights of other formats too, for which the answer "
                "differs; ask outside the traced code (torch.compiler.disable), or use "
                "qshard.nn.Linear",
            )
        twin = meta_replica(tensors_behind(fake)[0])
    geometry = (fake.shape, fake.stride())
    geometry = [[int(size) for size in sizes] for sizes in geometry]
    with no_dispatch():
        return twin.as_strided(*geometry, int(fake.storage_offset()))


def as_fake(result, fake):
    """A meta result as a fake one; not of the fake's storage, which has other bytes."""
    if not isinstance(result, torch.Tensor):
        return result
    with no_dispatch():
        size, stride, offset = result.shape, result.stride(), result.storage_offset()
        extent = result.untyped_storage().nbytes() // result.itemsize
    storage = torch.empty(extent, dtype=result.dtype, device=fake.device)
    return storage.as_strided(size, stride, offset)


# --------------------------------------------------------------------------------- fake kernels


@register_fake("qshard::quantize")
def quantize(self, format, *, keep_master=False, logical_rows=None, row_offset=0):
    def really(tensor):
        return run_really(
            ops.quantize.default,
            tensor,
            format,
            keep_master=keep_master,
            logical_rows=logical_rows,
            row_offset=row_offset,
        )

    if not isinstance(self, FakeTensor):
        return really(self)
    result = torch.empty(self.shape, dtype=self.dtype, device=self.device)
    if all(isinstance(n, int) for n in (*self.shape, logical_rows or 0, row_offset)):
        with no_dispatch():
            template = torch.empty(self.shape, dtype=self.dtype, device="meta")
        twins[result.untyped_storage()] = meta_replica(really(template))
    return result


@register_fake("qshard::from_planes")
def from_planes(codes, scale_inv, format, *, tensor_scale_inv=None, **kwargs):
    planes = [codes, scale_inv, tensor_scale_inv]
    is_fake = isinstance(codes, FakeTensor)
    if is_fake:
        with no_dispatch():
            planes = [
                None if plane is None else torch.empty(
                    [int(size) for size in plane.shape], dtype=plane.dtype, device="meta"
                )
                for plane in planes
            ]
    op = ops.from_planes.default
    real = run_really(op, *planes[:2], format, tensor_scale_inv=planes[2], **kwargs)
    if not is_fake:
        return real
    result = torch.empty(real.shape, dtype=real.dtype, device=codes.device)
    twins[result.untyped_storage()] = meta_replica(real)
    return result


@register_fake("qshard::from_row_image")
def from_row_image(image, format, **kwargs):
    op = ops.from_row_image.default
    if not isinstance(image, FakeTensor):
        return run_really(op, image, format, **kwargs)
    with no_dispatch():
        template = torch.empty([int(size) for size in image.shape], dtype=image.dtype, device="meta")
    real = run_really(op, template, format, **kwargs)
    result = torch.empty(real.shape, dtype=real.dtype, device=image.device)
    twins[result.untyped_storage()] = meta_replica(real)
    return result


@register_fake("qshard::is_quantized")
def is_quantized(self):
    # Compiled graphs are guarded on the dispatch keys of their inputs: no other kind comes there.
    return isinstance(self, FakeTensor) and is_behind(self, ops.is_quantized.default)


def register_accessor(name):
    op = getattr(ops, name).default

    @register_fake(f"qshard::{name}")
    def fake_accessor(self):
        if not isinstance(self, FakeTensor):
            return run_really(op, self)
        result = run_really(op, window_of_twin(self, op))
        if name == "master" and result is not None:  # a master is the tensor's own memory
            with no_dispatch():
                geometry = result.shape, result.stride(), result.storage_offset()
            return self.as_strided(*geometry)
        return as_fake(result, self)


def register_functional(name):
    """AOTAutograd's graphs have no aliases: there a plane is a copy, and a write to it an error."""

    @register_torch_dispatch(f"qshard::{name}", FunctionalTensorMode)
    def functional_accessor(mode, func, types, args, kwargs=None):
        with mode:
            copy = ops._plane_copy(*args, plane=name)
        if copy is not None:
            torch._freeze_functional_tensor(copy.elem)
        return copy


def register_constant(name):
    """Graphs have no strings for values: what these say when they are traced is a constant."""

    def constant(mode, func, types, args, kwargs=None):
        plain = torch._from_functional_tensor
        return func(*(plain(arg.elem) if isinstance(arg, torch.Tensor) else arg for arg in args))

    register_torch_dispatch(f"qshard::{name}", FunctionalTensorMode, constant)
    register_torch_dispatch(
        f"qshard::{name}", ProxyTorchDispatchMode, lambda mode, func, types, args, _: func(*args)
    )


@register_fake("qshard::_plane_copy")
def plane_copy(self, plane):
    if plane not in ALIASES:
        raise ValueError(f"qshard::_plane_copy: no plane is called {plane[:100]!r}")
    try:
        alias = getattr(ops, plane)(self)
    except TypeError as error:
        raise TypeError(f"qshard::_plane_copy: {error}") from None
    except OutsideGraphs as error:
        raise OutsideGraphs(ops._plane_copy.default, error.why) from None
    if alias is None:
        return None
    return torch.empty_strided(alias.shape, alias.stride(), dtype=alias.dtype, device=alias.device)


ALIASES = ("codes", "scale_inv", "tensor_scale_inv", "columnwise_codes", "row_image", "master")
for name in ALIASES:
    register_accessor(name)
    register_functional(name)
for name in ("columnwise_scale_inv", "format"):
    register_accessor(name)
for name in ("formats", "backend_report"):
    register_fake(f"qshard::{name}")(lambda op=getattr(ops, name).default: run_really(op))
register_fake("qshard::format_info")(lambda name: run_really(ops.format_info.default, name))
for name in ("format", "formats", "format_info", "backend_report"):
    register_constant(name)


# ------------------------------------------------------------------------------ compiled views


@wrap("torch:_C._dynamo.guards._reinterpret_tensor")
def view_in_compiled_code(stock):
    """Inductor's code makes a view by building a tensor anew, with the key set and the storage of another
    (torch/csrc/inductor/inductor_ops.cpp): of a quantized tensor that has no codes, and was refused when an
    operator met it. For these it gets a view. Which one it is says the tensor that the code was given, and
    not the one that it was compiled with, so that code in torch's caches serves both."""

    @functools.wraps(stock)
    def reinterpret_tensor(self, size, stride, offset_increment=0):
        if has_key(self):
            return torch.as_strided(self, size, stride, self.storage_offset() + offset_increment)
        return stock(self, size, stride, offset_increment)

    return reinterpret_tensor


# ------------------------------------------------------------------------------------- effects

# What these do no schema says. They change what belongs to a tensor beside its value: a mutation, declared,
# would be one of the value, for which compilers copy the weight and which counts as a write. All other
# operators declare what they write, or are there for their result; what no graph needs is no operator
# (qshard/_runtime/classes.py).
EFFECTS = (
    "flush",  # codes follow the value
    "_flush_after_step",
    "_mark_written",  # whether a flush is due
    "_pre_all_gather",  # it flushes, and begins a gather, which one of the next two ends
    "_gather_over_mesh",
    "_post_all_gather",
    "_refresh_gathered",
    "_finish_loading",  # of the process
)


def is_written_in_graph(tensor):
    has_mutation = getattr(torch, "_functionalize_has_data_mutation", None)  # a private name, too
    return has_mutation and isinstance(tensor, FunctionalTensor) and has_mutation(tensor.elem)


def register_effect(name):
    """As an ordered effect, which keeps such operators in traced graphs, in their order.

    torch.compile runs them between graphs instead: functionalization moves the write of a weight to the
    end of a graph, so that a flush within it would see the value before, and a read of codes after it
    may be made one with a read before."""
    op = getattr(ops, name).default
    if hasattr(effects, "_register_effectful_op"):  # a private name of torch's
        effects._register_effectful_op(op, effects._EffectType.ORDERED)

    @register_fake(f"qshard::{name}")
    def fake_effect(*args, **kwargs):
        if CompileContext.current_compile_id() is not None:
            raise OutsideGraphs(
                op,
                "torch.compile runs it between graphs, as it has to see the writes before it, and graphs "
                "write weights when they end; with fullgraph=True call it outside the compiled function",
            )
        if not any(isinstance(arg, FakeTensor) for arg in tree_leaves((args, kwargs))):
            return run_really(op, *args, **kwargs)
        if op._schema.returns or name == "_refresh_gathered":
            raise OutsideGraphs(op, "a gather is not traced")

    @register_torch_dispatch(f"qshard::{name}", FunctionalTensorMode)
    def functional_effect(mode, func, types, args, kwargs=None):
        if any(is_written_in_graph(tensor) for tensor in tree_leaves(args)):
            raise OutsideGraphs(
                op,
                "the traced code wrote this tensor, and a graph writes weights when it ends; call it "
                "outside the traced code",
            )
        return mode.__torch_dispatch__(func, types, args, kwargs)


for name in EFFECTS:
    register_effect(name)


# ------------------------------------------------------------------------------- flop formulas


def flops_of(*names):
    """Registers a formula of operators. It is given their arguments by the names that the schemas have."""

    def register(formula):
        for op in (getattr(ops, name) for name in names):
            register_flop_formula(op, get_raw=True)(by_name(formula, op))
        return formula

    return register


def by_name(formula, op):
    names = [argument.name for argument in op.default._schema.arguments]

    def count(*args, out_val=None, **kwargs):
        return formula(**dict(zip(names, args)), **kwargs)

    return count


@flops_of("linear", "linear_forward", "grouped_linear")
def linear_flops(input, weight, **_):
    return 2 * input.numel() * weight.shape[-2]


@flops_of("linear_cross_entropy")
def head_flops(input, linear_weight, **_):
    return 2 * input.numel() * linear_weight.shape[0]


@flops_of("linear_backward")
def linear_backward_flops(grad, weight, needs_input, needs_weight, grad_size=None, **_):
    values = math.prod(grad.shape if grad_size is None else grad_size)
    return 2 * values * weight.shape[-1] * (bool(needs_input) + bool(needs_weight))


# 2 x tokens x inner x outputs a GEMM; gate is (..., inner) of the parts, (rows, ...) of the MLP.


@flops_of("swiglu_mlp")
def mlp_flops(input, gate, up, down, **_):
    first = gate.shape[0] * (1 if up is None else 2)
    tokens = input.numel() // max(1, input.shape[-1])
    return 2 * input.numel() * first + 2 * tokens * down.shape[0] * down.shape[1]


@flops_of("swiglu_experts")
def experts_flops(input, gate, up, down, **_):
    first = gate.shape[1] * (1 if up is None else 2)
    return 2 * input.numel() * first + 2 * input.shape[0] * down.shape[1] * down.shape[2]


@flops_of("swiglu_linear_forward")
def swiglu_flops(gate, weight, **_):
    return 2 * gate.numel() * weight.shape[-2]


@flops_of("swiglu_linear_backward")
def swiglu_backward_flops(gate, weight, rows, columns, needs_weight, **_):
    return 2 * gate.numel() * weight.shape[-2] * (bool(needs_weight) + bool(rows or columns))


@flops_of("norm_linear", "_norm_linear_forward")
def norm_linear_flops(input, weights, **_):
    return sum(2 * input.numel() * weight.shape[0] for weight in weights)
