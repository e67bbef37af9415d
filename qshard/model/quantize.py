"""quantize_: make a model's weights quantized parameters."""

import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn as torch_nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from qshard._runtime.hooks import (
    dtensor_groups,
    has_tensor_type,
    holds_codes,
    local_of,
)
from qshard import module_state, nn, recipes
from qshard._runtime.classes import TensorState
from qshard._runtime.placement import group_names, place, roles_of, with_local
from qshard.dynamic_weights import modules as dynamic_modules
from qshard.dynamic_weights import weights as dynamic
from qshard.experts import known
from qshard.model import choosing, large_layers, scale_groups, state_buffers
from qshard.model.choosing import weight_names
from qshard.modules import parameter_swap, registrations, shown_formats
from qshard.modules.outside_graphs import outside_graphs
from qshard.nn import linear_subclasses
from qshard.nn.linear_subclasses import runs_as_linear

ops = torch.ops.qshard
_KNOWN = (nn.Linear, nn.LayerNormLinear, nn.LayerNormMLP, nn.GroupedLinear, nn.GroupedExperts)


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or the local tensor of a DTensor, is quantized. For a fake tensor:
    whether the one it was made from is."""
    local = local_of(tensor)
    # The operator, not the dispatch keys: compiled code is traced with fakes, which have other keys.
    return (has_tensor_type(local) or type(local) is FakeTensor) and ops.is_quantized(local)


@parameter_swap.outside_inference_mode
def quantize_(
    model: torch_nn.Module,
    recipe,
    *,
    keep_master: bool = True,
    weight_only: bool = False,
    stochastic_rounding: bool = False,
    weights: str = "quantized",
    group=None,
    persistent_state: bool = True,
    filter_fn: Callable[[torch_nn.Module, str], bool] | None = None,
    parameter_fn: Callable[[torch_nn.Parameter, str], bool] | None = None,
    tp_mesh=None,
    share_tensor_scale: bool | Sequence[Sequence[str]] = False,
) -> torch_nn.Module:
    """Quantizes the weights of a model's linear layers in place, and returns the model.

    The parameters stay the objects that they are, with their gradients and hooks: optimizers, EMA
    copies and `fully_shard` may come before or after.

    model: on any device, meta included; under `fully_shard` before its first forward, and before
        DistributedDataParallel(model).
    recipe: e.g. qshard.Float8BlockScaling(), or by its format's name, "float8_blockwise".
    keep_master: keep each weight's current value beside its codes, in its own dtype. Optimizer steps
        are then exactly those of a plain parameter. Without, the codes are all there is: 1 byte per
        element, and updates smaller than their resolution are lost.
    weight_only: leave activations and gradients in their dtype, and multiply by dequantized weights:
        less memory and fewer bytes gathered, without the error of quantized activations. Modules that
        multiply in ways of their own cannot take it, which is an error; experts of transformers can with
        experts_implementation="qshard".
    stochastic_rounding: for keep_master=False: round what optimizer steps make up or down at random,
        to the value on average, so that small updates add up. torch.manual_seed, called with one
        seed on all ranks, reproduces it on any mesh and device; a checkpoint holds its count.
    weights: "dynamic" leaves the parameters plain, for wrappers that own them (FSDP1, DDP, ZeRO, flat
        buffers): each module quantizes its weight at each use, forward and backward, and computes what
        a quantized weight with a master would. Before or after wrapping; of FSDP1 see
        `prepare_for_fsdp1`.
    group: for "dynamic" and DelayedScaling: the process group that agrees on amaxes after a step. Copies of
        the model (deepcopy, pickle) agree with no other rank.
    persistent_state: amax histories and that count are in the model's state_dict. False leaves it the
        names of the plain model's, for code that knows only those; save
        qshard.QuantizationState(model) beside it to resume bit for bit.
    filter_fn(module, name): which nn.Linear, LayerNormLinear and LayerNormMLP to quantize, and which modules of
        experts whose class is known: those that transformers dispatches by experts_implementation, and
        GroupedExperts of torchtitan, stack by stack (experts, rows, columns) and matrix by matrix. By default all
        but those that share their weight with an embedding, which would look up rounded values. One
        warning names what may surprise: these, an output layer as large as an embedding's table, stacks that
        stay plain, without a filter_fn matrices in modules of other kinds, and linears on a GPU that are for the
        most part too narrow to gain time by FP8 (`large_enough` leaves them out). The logger "qshard"
        says at level INFO what was taken. Call quantize_ again for modules that are to have another recipe.
    parameter_fn(parameter, name): which parameters of other modules to quantize, too, of two dimensions or
        more. bmm, einsum, grouped_mm and @ multiply by dequantized codes of stacks, in eager mode. Given, it
        also says that what it leaves is meant to stay plain.
    tp_mesh: the DeviceMesh that parallelize_module was given, of a tensor-parallel model: a DTensor does
        not say which of its dimensions are FSDP's; not needed where modules of qshard.nn or styles of
        qshard.tensor_parallel know it. quantize_ comes after parallelize_module, before or
        after `fully_shard`. Scale blocks begin anew in each rank's part; a weight's one scale is agreed
        on over all parts.
    share_tensor_scale: weights that inference engines run as one have one tensor scale, that of the
        largest amax among them, so that `qshard.checkpoint.save_quantized` writes the model's own
        codes. For NVFP4BlockScaling and Float8CurrentScaling. True: q/k/v_proj, gate/up_proj, wq/wk/wv,
        w1/w3 of one parent and one input; or lists of such names. They agree where they are flushed
        together, by the step of one optimizer that has all of them or by qshard.flush(model); after a
        load they have scales of their own until then.

    On a model after `fully_shard` this is a collective: call it on all ranks with the same arguments.
    Nothing is changed by wrong arguments, nor where a weight is in use by a graph that is alive or is
    held by a weak reference. Weights are converted one after the other, each plain one
    freed before the next, so memory never holds two models.
    """
    choosing.check_arguments(model, filter_fn, parameter_fn)
    recipe = recipes.recipe_of(recipe, "qshard.quantize_")
    format = recipe.format
    if stochastic_rounding:
        format = f"{format[:-1]},stochastic]" if format.endswith("]") else f"{format}[stochastic]"
    if stochastic_rounding and keep_master:
        raise ValueError(
            "qshard.quantize_: stochastic_rounding is for weights without a master, which holds what "
            "rounding would lose; pass keep_master=False"
        )
    if weight_only and recipes.is_emulated(format):
        raise ValueError(
            "qshard.quantize_: weight_only multiplies by dequantized weights on every device, so there is no "
            f"GEMM of codes for {type(recipe).__name__}(emulate=True) to emulate; leave one of the two out"
        )
    given = {
        "stochastic_rounding": stochastic_rounding,
        "keep_master=False": not keep_master,
        "persistent_state=False": not persistent_state,
        "tp_mesh": tp_mesh is not None,
        "share_tensor_scale": share_tensor_scale,
    }
    is_dynamic = dynamic_modules.check_arguments(weights, group, given)
    choice = choosing.Choice(model, filter_fn, parameter_fn, is_dynamic)
    chosen, further = choice.linears, choice.further
    if weight_only:
        choosing.refuse_weight_only(choice, lambda cls: cls in _KNOWN or runs_as_linear(cls))
    if is_dynamic and further:
        raise ValueError(
            f'qshard.quantize_: weights="dynamic" is of linears, which quantize at each use, and parameter_fn '
            f"chose {further[0][0]}; leave one of the two out"
        )
    narrow = () if weight_only else large_layers.said_of_narrow_layers(choice, format)
    if is_dynamic:
        dynamic_modules.quantize_at_each_use(model, chosen, format, weight_only, group)
        choice.say(f"{format} at each use", False, narrow)
        return model
    sharing = scale_groups.find(chosen, share_tensor_scale, format) if share_tensor_scale else []
    parameter_swap.check_model(model, "qshard.quantize_")
    dynamic_modules.refuse_fsdp1(chosen)

    tensor_groups = _tensor_groups(model, tp_mesh)
    weights = _named_weights(model, chosen, further)
    _refuse_tensor_parallel(chosen, tensor_groups)
    for name, parameter in weights:
        _check(parameter, format, keep_master, name, tensor_groups)
    scale_groups.regroup(chosen, sharing, format)
    in_group = {id(m.weight): m for _, m in chosen if scale_groups.of(m) is not None}
    for name, parameter in weights:
        module = in_group.get(id(parameter))
        quantized = _quantized(parameter, format, keep_master, name, tensor_groups, module)
        parameter_swap.replace(parameter, quantized)
    stateful = state_buffers.linked_to(model, (parameter for _, parameter in weights))
    for module in stateful:  # of the recipe before, tied ones too
        state_buffers.unlink(module)
    for _, module, attribute in further:
        state_buffers.name_weight(module, attribute)
        known.prepare(module, weight_only)
    for _, module in chosen:
        _prepare_module(module, weight_only, bool(tensor_groups) or tp_mesh is not None)
    for name, module in model.named_modules():
        _prepare_any(module, name)
    for module in (*(m for _, m in chosen), *(m for _, m, _ in further), *stateful):
        module_state.of(module).is_persistent = persistent_state
        state_buffers.link(module)
        _pad_now(module)
    flush(model)
    is_trained = any(weight.requires_grad for _, weight in weights)
    choice.say(format, is_trained and not keep_master and not stochastic_rounding, narrow)
    return model


@outside_graphs
def flush(model: torch_nn.Module) -> None:
    """Requantizes every weight that was written since its last flush, on any rank: one all-reduce
    per reduction group. Collective: call it on all ranks. Optimizer steps and FSDP2's all-gathers do
    it by themselves; this is for writes of your own, and coalesces what they would do one by one. With
    `weights="dynamic"` and DelayedScaling it rolls the histories that uses would roll."""
    ops.flush(_shards_of(model))
    dynamic.flush(model)


def flush_any_written(model: torch_nn.Module) -> None:
    """As flush, also of what some ranks only have written: they tell the others, in one all-reduce per reduction group,
    first."""
    shards, is_distributed = _shards_of(model), dist.is_available() and dist.is_initialized()
    if is_distributed and shards:
        rank = dist.get_rank()
        states = TensorState.written_by_rank(shards, [False] * len(shards), rank, dist.get_world_size())
        for shard, by_rank in zip(shards, states.tolist()):
            if by_rank[rank] == 1 and 2 in by_rank:
                ops._mark_written(shard)
    ops.flush(shards)
    dynamic.flush(model)


def _shards_of(model):
    """The local quantized tensors, which know their groups."""
    for module in model.modules():
        scale_groups.link(module)
    shards = []
    for param in model.parameters():
        local = local_of(param)
        if holds_codes(local) and not local.is_meta:
            groups = dtensor_groups([param])[0] if local is not param else 0
            if groups:  # without, it keeps what it knows
                TensorState(local).set_groups(groups)
            shards.append(local)
    return shards


@outside_graphs
def mark_written(tensor: torch.Tensor) -> None:
    """Says that a tensor's memory was written by code that moves no version counter (a kernel given its
    data_ptr(), NumPy, another process). Its codes follow at the next flush. A sharded parameter must
    be marked on all ranks. Optimizers need not: what has a gradient counts as written by their
    step."""
    local = local_of(tensor)
    if not holds_codes(local):
        raise TypeError(f"qshard.mark_written: expected a quantized tensor, got {type(tensor).__name__}")
    ops._mark_written(local)


def _named_weights(model, chosen, further):
    """The weights of the chosen modules, each once and by the name of the first that has it."""
    registered = {id(parameter) for parameter in model.parameters()}
    weights = {}
    for name, module in chosen:
        for attribute in weight_names(module):
            weight = getattr(module, attribute)
            if id(weight) not in registered:
                raise TypeError(
                    f"qshard.quantize_: the {attribute} of {name} is computed, by a parametrization "
                    "or a hook; remove that, or leave the layer out by filter_fn"
                )
            weights.setdefault(id(weight), (f"{name}.{attribute}", weight))
    for name, module, attribute in further:
        weights.setdefault(id(module._parameters[attribute]), (name, module._parameters[attribute]))
    return list(weights.values())


def _check(parameter, format, keep_master, name, tensor_groups):
    """Raises what quantizing a weight of this shape, dtype and placement would raise, on any rank."""
    parameter_swap.check(parameter, name, "qshard.quantize_")
    if isinstance(parameter, DTensor):
        placement = _placement_of(parameter, name, tensor_groups)
        placement.check(format, keep_master, parameter.dtype)
    else:
        ops.quantize(parameter.detach().to("meta"), format, keep_master=keep_master)


def _tensor_groups(model, tp_mesh):
    """Names of the groups that are tensor parallel: the caller's, and those that modules know."""
    names = set(group_names(tp_mesh)) if tp_mesh is not None else set()
    parallels = [state.parallel for state in map(module_state.find, model.modules())]
    names.update(parallel.group for parallel in parallels if parallel is not None)
    return sorted(names - {""})


def _refuse_tensor_parallel(chosen, tensor_groups):
    """The modules that qshard.nn's constructors make multiply whole weights."""
    for name, module in chosen:
        for weight in map(module.get_parameter, weight_names(module)):
            if not nn.base.is_constructed(module) or module._qshard.parallel is not None:
                continue
            if weight.dim() > 2:  # a stack, whose matrices each rank has whole
                continue
            if isinstance(weight, DTensor) and any(
                group in tensor_groups and not placement.is_replicate()
                for group, placement in zip(group_names(weight.device_mesh), weight.placements)
            ):
                raise NotImplementedError(
                    f"qshard.quantize_: {name}, a qshard.nn.{type(module).__name__}, is cut by "
                    f"tensor parallelism as {weight.placements}; parallelize torch.nn.Linear instead"
                )


def _quantized(param, format, keep_master, name, tensor_groups, module=None):
    """`module`: one that shares its weight's scale."""
    with torch.no_grad():
        value = quantize_like(param.detach(), format, keep_master, name, tensor_groups, module)
    state_buffers.set_rounding_key(local_of(value), name)
    return value


def _empty_like(param, format, keep_master):
    """A quantized tensor like a plain one, without values."""
    empty = torch.empty(param.shape, dtype=param.dtype, device="meta")
    return torch.empty_like(ops.quantize(empty, format, keep_master=keep_master), device=param.device)


def quantize_like(value, format, keep_master, name, tensor_groups=(), module=None):
    """Quantizes a plain tensor or DTensor; a DTensor keeps its mesh and placements. `tensor_groups`:
    names of the groups that are tensor parallel. `module`: whose scale group it is to be in."""
    if module is None or scale_groups.of(module) is None:
        return _quantize_like(value, format, keep_master, name, tensor_groups)
    if all(p.is_replicate() or value.device_mesh.size(i) == 1 for i, p in _placements(value)):
        # Not by a scale of its own first: without a master it would be rounded twice.
        local = local_of(value)
        quantized = _empty_like(local, format, keep_master)
        scale_groups.link(module, quantized)
        if not local.is_meta:
            quantized.copy_(local)
        return with_local(quantized, value) if isinstance(value, DTensor) else quantized
    quantized = _quantize_like(value, format, keep_master, name, tensor_groups)
    scale_groups.link(module, quantized)
    return quantized


def _placements(value):
    return enumerate(value.placements if isinstance(value, DTensor) else ())


def _quantize_like(value, format, keep_master, name, tensor_groups):
    if not isinstance(value, DTensor):
        return ops.quantize(value, format, keep_master=keep_master)
    placement = _placement_of(value, name, tensor_groups)
    return with_local(placement.quantize(value.to_local(), format, keep_master), value)


def _placement_of(value, name, tensor_groups):
    return place(value.device_mesh, value.placements, value.shape, tensor_groups, name)


def _prepare_module(module, weight_only, is_tensor_parallel):
    dynamic_modules.uninstall(module)
    if runs_as_linear(type(module)):
        module.__class__ = linear_subclasses.quantized_class(type(module))
    if isinstance(module, nn.base.Initialized) or runs_as_linear(type(module)):
        how = module_state.of(module)
        how.weight_only, how.is_tensor_parallel = weight_only, is_tensor_parallel
        how.weight_format = ops.format(local_of(getattr(module, weight_names(module)[0])))


def _prepare_any(module, name):
    """A module of any class whose own parameters are quantized, such as one that is tied to another."""
    own = ((n, local_of(p)) for n, p in module._parameters.items() if p is not None and is_quantized(p))
    formats = {n: ops.format(local) for n, local in own}
    if not formats:
        return
    state_buffers.hand_out_masters(module)
    if any(is_quantized(weight) for _, weight in state_buffers.weights(module)):
        _follow_loads(module)
    if type(module) is torch_nn.Embedding:
        module.__class__ = nn.Embedding
    kept = module_state.of(module)
    kept.name = name
    kept.forget("told", "weight_formats")
    kept.remove_hooks("use")
    shown_formats.hide(module)
    if kept.weight_format is not None:  # its forward and its extra_repr are ours
        return
    kept.weight_formats = formats
    registrations.watch_use(module)
    if type(module) is not nn.Embedding:
        shown_formats.show(module)


def _follow_loads(module):
    state_ = module_state.of(module)
    state_.add_hooks("assign", lambda: [module.register_load_state_dict_pre_hook(_quantize_on_assign)])
    state_.add_hooks("flush", lambda: [module.register_load_state_dict_post_hook(_flush_parts)])


def _flush_parts(module, _):
    """Under FSDP2 all-gathers flush; where tensor parallelism alone cuts, the load has to: the ranks are
    all there."""
    for _, weight in state_buffers.weights(module):
        if isinstance(weight, DTensor) and is_quantized(weight):
            rows, tensor, _ = roles_of(weight, "a weight")
            if tensor and rows is None:
                return flush(module)


def forget_module(module):
    """Undoes what quantize_ did to a module."""
    dynamic_modules.uninstall(module)
    known.forget(module)
    if type(module) is nn.Embedding:
        module.__class__ = torch_nn.Embedding
    elif not nn.base.is_constructed(module):
        module.__class__ = linear_subclasses.plain_class(type(module))
    shown_formats.hide(module)
    scale_groups.forget(module)
    kept = module_state.find(module)
    kept.forget(
        "is_persistent", "weight_names", "weight_formats", "weight_only", "weight_format", "is_tensor_parallel",
        "name", "told",
    )
    kept.remove_hooks("assign", "flush", "masters", "weight_only", "use")
    module_state.remove_if_empty(module)


def _pad_now(module):
    """FSDP2 moves a parameter that it has not seen before into a padded one at its first use, and after
    loads, by a hook of its own in the module (FSDPParam.__init__). Views made until then would be views no
    more on ranks with padding, so that hook runs now; a load of nothing would run the user's code, too."""
    fsdp_param = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param")
    for hook in list(module._load_state_dict_post_hooks.values()):
        if fsdp_param is not None and getattr(hook, "__globals__", None) is vars(fsdp_param):
            hook(module, None)


def _quantize_on_assign(module, state_dict, prefix, local_metadata, *_):
    """load_state_dict(assign=True) would put plain parameters where quantized ones are; DCP's
    set_model_state_dict does that to meta models."""
    if state_buffers.has_buffers(module):  # not those that are tied to a linear
        state_buffers.link(module)
        state_buffers.fill_missing(module, state_dict, prefix)
    if not local_metadata.get("assign_to_params_buffers", False):
        return
    for name, old in state_buffers.weights(module):
        new = state_dict.get(prefix + name)
        if new is None or not is_quantized(old) or new.shape != old.shape:
            continue
        if is_quantized(new):
            if TensorState(local_of(new)).is_export():  # what a state_dict has of a DTensor
                local = local_of(new)
                copied = TensorState(local).copy_buffer()
                copied = copied.as_strided(local.shape, local.stride(), local.storage_offset())
                state_dict[prefix + name] = with_local(copied, new)
            continue
        state_dict[prefix + name] = _quantized_to_assign(module, old, new, state_dict, prefix + name)


def _quantized_to_assign(module, old, new, state_dict, key):
    local = local_of(old)
    format, keep_master = ops.format(local), TensorState(local).keeps_master()
    with torch.no_grad():
        if isinstance(new, DTensor):  # shards wait for their flush
            groups = state_buffers.tensor_groups(old)
            value = quantize_like(new.detach(), format, keep_master, key, groups, module)
        else:
            value = _empty_like(new, format, keep_master)
            scale_groups.link(module, value)
        state_buffers.set_rounding_key(local_of(value), key)
        state_buffers.load(value, state_dict, key)
        # A new DTensor has its values. A state changes how they are quantized, which a shard that is
        # all there is has been already; others wait for their flush.
        has_values = isinstance(new, DTensor) and not TensorState(local_of(value)).scaling_state()
        if not has_values and not new.is_meta:
            local_of(value).copy_(local_of(new))
    return value
