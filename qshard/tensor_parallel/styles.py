"""Styles of parallelize_module. Linears that quantize_ has quantized run on plain local tensors, and where
sequence parallelism gathers, codes travel; any other module is torch's."""

import copy
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import style as stock

from qshard import module_state
from qshard.modules.calls import count_hooks
from qshard.tensor_parallel import collectives
from qshard.tensor_parallel.local import TensorParallel, check_can_be_read
from qshard.tensor_parallel.shared import shared


@dataclass(frozen=True)
class LinearStyle:
    """The style of a linear, for those who run several linears as one step, without the style's hooks.

    hooks: how many these are, forward's and before it. (Compiled code would be made anew for each module
        by their ids.)
    """

    style: stock.ParallelStyle
    mesh: DeviceMesh
    hooks: int

    @classmethod
    def applied(cls, style, apply, module, mesh, mode, layouts):
        """apply(module, mesh), which adds the style's hooks; a linear knows them afterwards."""
        before = count_hooks(module)
        module = apply(module, mesh)
        if isinstance(module, torch.nn.Linear):
            state = module_state.of(module)
            state.style = cls(style, mesh, count_hooks(module) - before)
            state.parallel = _parallel(mode, layouts, mesh)
        return module

    def __deepcopy__(self, memo):
        return self  # meshes are those of the process

    def enter(self, module, x):
        """What the linear is given of x."""
        style = self.style
        return style._prepare_input_fn(
            style.input_layouts, style.desired_input_layouts, module, (x,), self.mesh
        )

    def leave(self, module, y):
        """What the module returns of the linear's output."""
        style = self.style
        return style._prepare_output_fn(
            style.output_layouts, style.use_local_output, module, y, self.mesh
        )

    @property
    def takes_local_features(self):
        """Whether an input is a local tensor, cut by features."""
        return self.style.input_layouts == (Shard(-1),)

    @property
    def gives_local_features(self):
        return self.style.use_local_output and self.style.output_layouts == (Shard(-1),)

    def is_like(self, other):
        """Whether two linears make the same of an input and of an output."""
        mine, theirs = self.style, other.style
        return (
            type(mine) is type(theirs)
            and self.mesh == other.mesh
            and mine.input_layouts == theirs.input_layouts
            and mine.output_layouts == theirs.output_layouts
            and mine.use_local_output == theirs.use_local_output
        )


class ColwiseParallel(stock.ColwiseParallel):
    """torch's, for linears that `quantize_` quantizes afterwards: an input cut along a dimension of tokens
    (input_layouts=Shard(1)) is gathered as codes and scales, 1 byte per element and less for NVFP4. That
    dimension has to be a multiple of the ranks.

    Arguments, and what other modules do: as in torch."""

    def _apply(self, module, device_mesh):
        layouts = self.input_layouts
        return LinearStyle.applied(self, super()._apply, module, device_mesh, "column", layouts)

    @staticmethod
    def _prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh):
        if not _runs_locally(mod):
            return stock.ColwiseParallel._prepare_input_fn(
                input_layouts, desired_input_layouts, mod, inputs, device_mesh
            )
        (x,) = inputs
        parallel, format = mod._qshard.parallel, mod._qshard.message_format
        if isinstance(x, DTensor):
            if x.placements == desired_input_layouts:
                # Partial gradients are summed, and reduced once.
                return shared(x, (), lambda: x.to_local(grad_placements=(Partial(),)))

            def enter():
                given = _local(x, input_layouts, "ColwiseParallel")
                return parallel.enter(given, format, (mod.weight,))

            return shared(x, (parallel, format), enter)
        return parallel.enter(x, format, (mod.weight,))

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        if not _runs_locally(mod) or isinstance(outputs, DTensor):
            return stock.ColwiseParallel._prepare_output_fn(
                output_layouts, use_local_output, mod, outputs, device_mesh
            )
        last = Shard(outputs.ndim - 1)
        if use_local_output and output_layouts in ((Shard(-1),), (last,)):
            return outputs
        outputs = _wrapped(outputs, device_mesh, last, mod.weight.shape[0])
        return stock.ColwiseParallel._prepare_output_fn(
            output_layouts, use_local_output, mod, outputs, device_mesh
        )


class RowwiseParallel(stock.RowwiseParallel):
    """torch's, for linears that `quantize_` quantizes afterwards: with output_layouts=Shard(1) the gradient
    of the output is gathered as codes and scales (of NVFP4 as values). That dimension has to be a
    multiple of the ranks.

    Arguments, and what other modules do: as in torch."""

    def _apply(self, module, device_mesh):
        layouts = self.output_layouts
        return LinearStyle.applied(self, super()._apply, module, device_mesh, "row", layouts)

    @staticmethod
    def _prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh):
        (x,) = inputs
        is_cut = input_layouts in ((Shard(-1),), (Shard(x.ndim - 1),))
        if not _runs_locally(mod) or not is_cut:
            x = stock.RowwiseParallel._prepare_input_fn(
                input_layouts, desired_input_layouts, mod, inputs, device_mesh
            )
            if not _runs_locally(mod):
                return x
        if isinstance(x, DTensor):
            x = _local(x, (Shard(x.ndim - 1),), "RowwiseParallel")
        mod._qshard.parallel.check_output(x)
        return x

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        if not _runs_locally(mod) or isinstance(outputs, DTensor):
            return stock.RowwiseParallel._prepare_output_fn(
                output_layouts, use_local_output, mod, outputs, device_mesh
            )
        outputs = mod._qshard.parallel.leave(outputs, mod._qshard.message_format)
        if use_local_output:
            return outputs
        (placement,) = output_layouts
        if placement.is_shard():
            placement = Shard(mod._qshard.parallel._dim(outputs))
        return DTensor.from_local(outputs, device_mesh, (placement,), run_check=False)


class PrepareModuleInput(stock.PrepareModuleInput):
    """torch's. An input that goes from Shard, along a dimension of tokens, to Replicate is gathered as codes
    and scales if all linears in the module that are quantized have one format. That dimension has to
    be a multiple of the ranks. With use_local_output the gradients of what the module is given are
    taken for whole, as in torch; without, they are summed in the reduce-scatter.

    Arguments: as in torch."""

    def _apply(self, module, device_mesh):
        style = copy.copy(self)  # one may be given to several modules
        style._module = module
        return super(PrepareModuleInput, style)._apply(module, device_mesh)

    def _prepare_input_arg(self, input, mesh, input_layout, desired_layout):
        format = _common_format(self._module)
        if (
            not format
            or not isinstance(input, torch.Tensor)
            or mesh.size() == 1
            or not _is_of_tokens(input_layout, input.ndim)
            or desired_layout is None
            or not desired_layout.is_replicate()
        ):
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        if isinstance(input, DTensor):
            input = _local(input, (input_layout,), "PrepareModuleInput")
        check_can_be_read(_weights_over(mesh, self._module))
        parallel = TensorParallel.over(mesh, "column", input_layout.dim)
        if torch.compiler.is_compiling():
            # Dynamo traces a backward for a gradient that is placed as the output is, and this one may
            # be Partial: from_local makes it whole.
            values = _GatherWhole.apply(input, parallel, format)
            gathered = DTensor.from_local(values, mesh, (Replicate(),), run_check=False)
        else:
            gathered = _GatherToDTensor.apply(input, parallel, format)
        return gathered.to_local() if self.use_local_output else gathered


class _GatherToDTensor(torch.autograd.Function):
    """A gathered input as a DTensor, whose gradients add up as Partial ones."""

    @staticmethod
    def forward(ctx, x, parallel, format):
        ctx.parallel, ctx.dim = parallel, parallel._dim(x)
        values = collectives.gathered(x, ctx.dim, format, False, parallel.group)
        return DTensor.from_local(values, parallel.mesh, (Replicate(),), run_check=False)

    @staticmethod
    def backward(ctx, grad):
        parallel = ctx.parallel
        (placement,) = grad.placements
        local = grad.to_local()
        if placement.is_partial():
            part = collectives.scattered_sum(local, ctx.dim, parallel.group)
        else:
            part = _part(local if placement.is_replicate() else grad.full_tensor(), parallel, ctx.dim)
        return part, None, None


class _GatherWhole(torch.autograd.Function):
    """A gathered input whose gradient is whole on all ranks."""

    @staticmethod
    def forward(ctx, x, parallel, format):
        ctx.parallel, ctx.dim = parallel, parallel._dim(x)
        return collectives.gathered(x, ctx.dim, format, False, parallel.group)

    @staticmethod
    def backward(ctx, grad):
        return _part(grad, ctx.parallel, ctx.dim), None, None


def _part(whole, parallel, dim):
    return whole.chunk(parallel.ranks, dim)[parallel.mesh.get_local_rank()].contiguous()


def _parallel(mode, layouts, mesh):
    """How a linear runs locally whose tokens lie outside as `layouts` says, or None: as torch's style does."""
    (layout,) = layouts
    if layout.is_replicate():
        return TensorParallel.over(mesh, mode)
    if layout.is_shard() and layout.dim != -1:
        return TensorParallel.over(mesh, mode, layout.dim)
    return None


def _is_of_tokens(layout, ndim):
    return layout is not None and layout.is_shard() and layout.dim not in (-1, ndim - 1)


def _runs_locally(module):
    state = module_state.current(module)
    return state.weight_format is not None and state.parallel is not None


def _weights_over(mesh, module):
    """Those that a forward of the module reads as they are: FSDP2's are flushed when they are gathered."""
    weights = [child.weight for child in module.modules() if _runs_locally(child)]
    return [w for w in weights if isinstance(w, DTensor) and w.device_mesh == mesh]


def _common_format(module):
    states = map(module_state.current, module.modules())
    formats = {state.message_format for state in states if state.weight_format is not None}
    return formats.pop() if len(formats) == 1 else None


def _local(x, layouts, style):
    """The local tensor of a DTensor, placed as the style says; along tokens in equal parts."""
    if x.placements != layouts:
        x = x.redistribute(placements=layouts)
    (layout,) = layouts
    ranks = x.device_mesh.size()
    if _is_of_tokens(layout, x.ndim) and x.shape[layout.dim] % ranks:
        raise ValueError(
            f"qshard.tensor_parallel.{style}: dimension {layout.dim} of an input of shape "
            f"{tuple(x.shape)} is no multiple of the {ranks} ranks that cut it; pad it, or use torch's "
            "style, which gathers values"
        )
    return x.to_local()


def _wrapped(local, mesh, placement, features):
    shape = torch.Size((*local.shape[:-1], features))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, (placement,), run_check=False, shape=shape, stride=stride
    )
