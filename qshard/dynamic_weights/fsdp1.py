"""FSDP1 (torch.distributed.fsdp.FullyShardedDataParallel) with weights that stay plain: the ranks of a
unit agree on amaxes once per step, and its all-gather carries codes.

FSDP1 keeps the parameters of a unit in one flat parameter and cuts that into equal shards, in the middle
of rows and blocks. What a rank has of a weight is a range of its elements.
"""

import warnings
import weakref

from torch import nn

from qshard._runtime.hooks import of_package, synthetic_steps
from qshard import module_state
from qshard.dynamic_weights import flat_parameters
from qshard.dynamic_weights.companies import Occasion
from qshard.dynamic_weights.fsdp1_units import Unit, agree, is_in_backward, optimizers_in_backward
from qshard.dynamic_weights.weights import Installed

_GATHERS = ("quantized", "param_dtype")
_HANDLE = ("_all_gather_flat_param", "_uses_param_mixed_precision", "_force_full_precision")


def prepare_for_fsdp1(fsdp_root: nn.Module, *, gather: str = "quantized") -> nn.Module:
    """Prepares a model under FullyShardedDataParallel whose weights `quantize_(..., weights="dynamic")`
    left plain, and returns it.

    Ranks agree on amaxes by one all-reduce over all units: after each optimizer step, before each forward,
    as only a rank itself knows what it has written, and once here; of optimizers in backward at the next
    forward or state dict. Histories of delayed scaling need this call;
    other weights compute the same without it, and gather more.

    fsdp_root: any FullyShardedDataParallel module, with its units; every `use_orig_params` and sharding
        strategy.
    gather: "quantized": all-gathers carry 1 byte per element of weights in per-tensor or 128x128 scaled
        FP8, and everything else in full; for units with MixedPrecision(param_dtype=), as only these have
        a buffer of their own for full precision. "param_dtype": gather as without qshard.

    Other formats and fp32 scales are gathered in full: what is quantized twice must be the same twice. A
    unit's ranks send messages of one size, that of the fullest. summon_full_params, state dicts and
    checkpoints see full precision. Written values are noticed by their version counters: optimizer steps,
    loads, summon_full_params, in-place operators, on all ranks or some; not `.data`. After
    quantize_(..., weights="dynamic") with another recipe, or `dequantize_`, on all ranks alike, the formats
    that modules then have are gathered.

    With DelayedScaling the amaxes of weights in FSDP1's ignored_modules or ignored_states are agreed on over
    the `group` of quantize_, or over FSDP1's.

    A part of a prepared model that is prepared, too, gets its own `gather`; a model of which parts were
    prepared takes them over.

    Collective: call it on all ranks. Raises TypeError if fsdp_root is not under FSDP1, ValueError for
    an unknown `gather` or a model without such weights; LOCAL state dicts are refused afterwards.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    if gather not in _GATHERS:
        raise ValueError(
            f"qshard.prepare_for_fsdp1: gather is {' or '.join(map(repr, _GATHERS))}, got {gather!r}"
        )
    if not isinstance(fsdp_root, FullyShardedDataParallel):
        raise TypeError(
            "qshard.prepare_for_fsdp1: expected a FullyShardedDataParallel module, got "
            f"{type(fsdp_root).__name__}; call it after wrapping. fully_shard (FSDP2) needs no "
            'preparation: call qshard.quantize_ without weights="dynamic"'
        )
    modules = [m for m in FullyShardedDataParallel.fsdp_modules(fsdp_root) if _handle_of(m)]
    if not any(True for _ in module_state.dynamics_of(fsdp_root)):
        raise ValueError(
            "qshard.prepare_for_fsdp1: no module of this model quantizes its weight at each use; call "
            'qshard.quantize_(model, recipe, weights="dynamic") first'
        )
    missing = {
        name
        for m in modules
        for name in flat_parameters.ATTRIBUTES
        if not hasattr(_handle_of(m).flat_param, name)
    }
    if missing:
        raise NotImplementedError(
            "qshard.prepare_for_fsdp1: this torch's flat parameters do not say where weights lie in them "
            f"({', '.join(sorted(missing))}); without this call every recipe but DelayedScaling works"
        )
    if gather == "quantized" and not all(_can_gather_codes(_handle_of(m)) for m in modules):
        gather = "param_dtype"
        _warn_once("this torch's FSDP1 lacks what gather='quantized' replaces; param_dtype is gathered")
    whole = _preparation_around(fsdp_root)
    if whole is None:
        module_state.of(fsdp_root).fsdp1 = _Preparation(fsdp_root, modules, gather)
    else:
        whole.renew(modules, gather)
    return fsdp_root


def _preparation_around(fsdp_root):
    """That of a model which this one is a part of, and which goes on to let its units agree. Preparations of
    this one and of its parts are undone."""
    parts, around = {id(module) for module in fsdp_root.modules()}, None
    for preparation in [reference() for reference in _preparations]:
        if preparation is None:
            continue
        if id(preparation.root) in parts:
            preparation.remove()
        elif any(id(unit.module) in parts for unit in preparation.units):
            around = preparation
    return around


def _handle_of(module):
    return getattr(module, "_handle", None)


def _can_gather_codes(handle):
    return all(hasattr(type(handle), name) for name in _HANDLE)


class _Preparation:
    """What a prepared root keeps. Not part of its modules, parameters or state."""

    def __init__(self, root, modules, gather):
        self.root = root
        self.units = [Unit(module, gather) for module in modules]
        if gather == "quantized" and not any(unit.gathers_codes for unit in self.units):
            why = _why_nothing_is_gathered(self.units, root)
            if why:
                _warn_once(f"gather='quantized' gathers everything in param_dtype: {why}")
        self.hooks = [
            root.register_forward_pre_hook(self._before_forward),
            root.register_forward_hook(self._after_forward, always_call=True),
            root.register_state_dict_pre_hook(self._before_state_dict),
            root.register_load_state_dict_pre_hook(self._before_state_dict),
        ]
        self._ignored, self._installed = [], None
        self._find_ignored()
        agree(self.units)
        _preparations.append(weakref.ref(self, _forget))

    def renew(self, modules, gather):
        """Prepares some of the units anew."""
        renewed = []
        for i, unit in enumerate(self.units):
            if any(unit.module is module for module in modules):
                unit.remove()
                self.units[i] = Unit(unit.module, gather)
                renewed.append(self.units[i])
        agree(renewed)

    def _before_forward(self, *_):
        """Whatever was written since the last one, on whichever ranks."""
        if is_in_backward():  # of values that this forward has read before
            return
        agree(self.units)
        for unit in self.units:
            unit.is_in_root_forward = True
        self._find_ignored()

    def _after_forward(self, *_):
        for unit in self.units:
            unit.is_in_root_forward = False

    def _find_ignored(self):
        """Delayed scaling of whole weights, which FSDP1's ignored_modules or ignored_states name: their
        amaxes are agreed on like those of the units, if not over a group that quantize_ was told."""
        if self._installed == Installed.count:
            return
        self._installed = Installed.count
        groups = (self.root.process_group, getattr(self.root, "_inter_node_pg", None))
        names = tuple(group.group_name for group in groups if group is not None)
        for _, dynamic in module_state.dynamics_of(self.root):
            if not dynamic.state or dynamic.is_ignored:
                continue
            if dynamic.whole_weight() is not None:
                self._ignored.append((dynamic, dynamic.groups))
                dynamic.is_ignored = True
                dynamic.join(dynamic.groups or names)

    def _forget_ignored(self):
        for dynamic, groups in self._ignored:
            dynamic.is_ignored = False
            dynamic.join(groups)

    def _before_state_dict(self, module, *_):
        """All ranks call it for sharded units."""
        _refuse_local(module)
        agree([unit for unit in self.units if unit.is_stepped_in_backward])

    def __deepcopy__(self, memo):
        raise NotImplementedError(
            "qshard: a model that was prepared for FSDP1 cannot be copied; copy it before wrapping"
        )

    def remove(self):
        module_state.of(self.root).forget("fsdp1")
        module_state.remove_if_empty(self.root)
        _preparations[:] = [known for known in _preparations if known() is not self]
        for unit in self.units:
            unit.remove()
        self._forget_ignored()
        for hook in self.hooks:
            hook.remove()


def prepared_units(model: nn.Module) -> dict[int, Unit]:
    """By the id of its FSDP1 handle, each unit of a model that `prepare_for_fsdp1` prepared."""
    handles = (unit._handle for _, unit in flat_parameters.units(model))
    found = {id(handle): getattr(handle, "_qshard_unit", None) for handle in handles}
    units = {key: unit for key, unit in found.items() if unit is not None}
    for unit in units.values():
        unit.follow()
    return units


def _why_nothing_is_gathered(units, root):
    if all(not unit.is_sharded for unit in units):
        return ""  # nothing is gathered at all
    if not any(unit.has_buffer_of_its_own() for unit in units):
        return "it needs MixedPrecision(param_dtype=torch.bfloat16), or another one than the parameters'"
    return "the recipes' scales lie in the rows, or are not powers of two"


def _refuse_local(module):
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    kind = FullyShardedDataParallel.get_state_dict_type(module).state_dict_type
    if kind == StateDictType.LOCAL_STATE_DICT:
        raise NotImplementedError(
            "qshard: LOCAL state dicts of flat parameters fit one world size and no other model; call "
            "FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT), or FULL_STATE_DICT"
        )


_preparations: list = []


def _forget(reference):
    if reference in _preparations:
        _preparations.remove(reference)


def _after_step(optimizer, taken):
    """One all-reduce over the units of which the optimizer holds a parameter. What it writes after a step within
    its own is noticed as any write. Units with pieces of parameters meet if any unit of the model does: a rank
    may have no piece of them, and its optimizer then holds none."""
    if not _preparations:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    held = {id(param) for param in params if param.requires_grad and id(param) not in taken}
    is_in_backward = any(optimizer is other for p in params for other in optimizers_in_backward(p))
    for reference in list(_preparations):
        preparation = reference()
        units = [u for u in (preparation.units if preparation else ()) if u.is_held(held)]
        if is_in_backward:  # not on all ranks: the next forward agrees
            units = [u for u in units if not u.is_stepped_in_backward]
        elif units:
            units = [u for u in preparation.units if u.has_pieces or u in units]
        if units:
            found_inf = getattr(optimizer, "found_inf", None)
            agree(units, Occasion.VALUES if synthetic_steps else Occasion.STEP, held, found_inf)


of_package.agree_in_units = _after_step

_said: set[str] = set()


def _warn_once(text):
    if text not in _said:
        _said.add(text)
        warnings.warn(f"qshard.prepare_for_fsdp1: {text}", stacklevel=3)
