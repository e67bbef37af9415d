"""Weights that stay plain: modules quantize them at each use, under whatever wrapper owns them.

What a module needs for that is its `DynamicWeight`, one for each weight: tied modules share it.
"""

import weakref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from qshard import module_state
from qshard._runtime.classes import TensorState
from qshard._runtime.hooks import is_replicated, of_package, synthetic_steps
from qshard.dynamic_weights import companies, forward_of_values
from qshard.dynamic_weights.companies import Occasion, ranks_meet
from qshard.modules.functional import linear_under_transforms

ops = torch.ops.qshard

# What a rank knows of a weight when its state is brought up to date (ops/wire/agree_on_ranges.h): that no step made
# its values; or that a step did, whose optimizer holds the weight here, and that a backward reached it here.
NO_STEP, STEP, HELD, REACHED = 0, 1, 2, 4
OF_IT = STEP | HELD | REACHED


class _Steps:
    """Optimizer steps so far, and those of optimizers without a weight of delayed scaling, which may hold
    copies that the trainer writes the weights from afterwards; found_inf of the last."""

    all, of_others, found_inf = 0, 0, None


class Installed:
    """How often modules got or lost a DynamicWeight: what was found of them holds while it stays."""

    count = 0


class GradientWatch:
    """Whether backward reached a weight since its history rolled. In a flat parameter `.grad` does not tell:
    of weights that were not used it is zeros."""

    def __init__(self):
        self.is_reached = False

    def __call__(self, grad):
        self.is_reached = True

    def watch(self, weight):
        if torch.compiler.is_compiling():
            self.is_reached = True  # nearly always it will be
        elif torch.is_grad_enabled() and weight.requires_grad and not weight.is_leaf:
            weight.register_hook(self)


class DynamicWeight:
    """How the modules of one plain weight quantize it.

    state: delayed scaling's amax_history and scaling_amax, else empty.
    groups: c10d names of the groups that agree on amaxes, one after the other. Copies agree with no other
        rank.
    uses: modules that read the weight in a forward. If there are several, the first quantizes it, and its
        codes are kept until the backward of the last; alone, a weight is quantized again in backward.
    is_ignored: FSDP1 leaves the weight alone, as it was told to.
    is_cut: FSDP2 has cut the weight.
    is_due: ranks of its company have agreed on its amaxes, and its history has yet to roll.
    managed: the FSDP1 unit, which knows the shards of the weight, keeps the state up to date.
    gradient: for delayed scaling, tells whether a managed weight got one.
    forward_precision: "bf16": forward multiplies the weight's values, rounded to it, and backward codes; None: both
        multiply codes.
    known_amax: for current scaling, [float32 (grid,)] while the FSDP1 unit knows the amaxes of the weight as
        it is read: uses look for none. Else empty.

    With delayed scaling the steps of an optimizer that holds the weight say when histories roll. Until there
    is one, each use looks at the values, which may be written through a flat buffer, or as `.data`, and
    the first use after another optimizer's step is of what that one wrote. Ranks of groups agree in that
    step, and on nothing in a use, which one rank alone may make.
    """

    is_cut = is_due = False
    forward_precision = None

    def __init__(self, format: str, shape: tuple[int, int], groups: tuple[str, ...] = ()):
        self.format, self.shape, self.groups = format, shape, groups
        # The tables of a quantized tensor that was never flushed; real where the model is made on meta.
        values = torch.empty(shape, dtype=torch.float32, device="meta")
        tables = TensorState(ops.quantize(values, format)).scaling_state().values()
        self.state = [torch.zeros(t.shape, dtype=torch.float32, device="cpu") for t in tables]
        self.owner = None  # a module that has the weight
        self.uses, self.managed, self.is_ignored, self.known_amax = 0, False, False, []
        self.gradient = GradientWatch()
        self._seen = None  # version and address of the values that `state` is of
        self._steps_told = companies.StepsTold()
        self._steps, self._is_used = _Steps.of_others, False  # as of the last roll, since it in training
        self._shared = None  # weight, what it was, quantized tensor, uses left
        self.company = None  # of groups
        self.join(groups)

    def __getstate__(self):
        of_copy = {"_seen": None, "_shared": None, "managed": False, "known_amax": []}
        of_copy["groups"] = ()  # one rank alone may use the copy
        here = ("company", "is_cut", "is_due", "_steps_told")
        kept = {n: value for n, value in self.__dict__.items() if n not in here}
        return {**kept, **of_copy, "_steps": self._steps - _Steps.of_others}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.__dict__.pop("_is_told", None)  # of earlier pickles
        self.company, self._steps_told = None, companies.StepsTold()
        self._steps += _Steps.of_others
        if self.state:
            delayed_weights.add(self)

    @property
    def _is_told(self):
        """Whether an optimizer has stepped the weight itself."""
        return self._steps_told.is_told

    def join(self, groups: tuple[str, ...]) -> None:
        """Agrees with these groups from now on. All their ranks say so, in the same order of weights."""
        self.groups = groups
        self.company = companies.of(groups, self) if groups and self.state else None

    @property
    def scaling(self) -> list[torch.Tensor]:
        """What a use reads: ops.linear's weight_state."""
        return self.state or self.known_amax

    def linear(self, module: nn.Linear, input: torch.Tensor, how) -> torch.Tensor:
        """`how`: the ModuleState of module."""
        weight, is_traced = module.weight, torch.compiler.is_compiling()
        self.prepare(module, weight)
        if self.forward_precision is not None:
            return forward_of_values.linear(input, weight, module.bias, self.format, how.weight_only)
        if not is_traced and torch._C._are_functorch_transforms_active():
            if self.state:
                raise NotImplementedError(
                    f"qshard.nn.Linear: {self.format} under torch.func transforms is not supported for "
                    'weights="dynamic"; use another recipe'
                )
            return linear_under_transforms(input, weight, module.bias, how.weight_only, self.format)
        if self.uses > 1 and not is_traced:
            output = ops.linear(input, self._quantize(weight), module.bias, weight_only=how.weight_only)
        else:
            options = {"weight_only": how.weight_only, "format": self.format, "weight_state": self.scaling}
            output = ops.linear(input, weight, module.bias, **options)
        if not is_traced and self.company is not None and not self._is_told and output.requires_grad:
            output.register_hook(self._note_training)
        return output

    def embedding(self, module: nn.Embedding, input: torch.Tensor) -> torch.Tensor:
        """A lookup of what the linears of this weight multiply by."""
        return F.embedding(
            input,
            self.rounded(module, module.weight),
            module.padding_idx,
            scale_grad_by_freq=module.scale_grad_by_freq,
            sparse=module.sparse,
        )

    def rounded(self, module, weight: torch.Tensor) -> torch.Tensor:
        """The values of the codes, or what forward multiplies in their place."""
        self.prepare(module, weight)
        if self.forward_precision is not None:
            return weight
        if torch.compiler.is_compiling():
            quantized = ops.quantize(weight, self.format)
        else:
            quantized = self._quantize(weight)
        return ops.dequantize(quantized)

    def _quantize(self, weight):
        """Quantized once for all modules that use it in one forward."""
        key = (*_seen(weight), _Steps.all, torch.is_grad_enabled())
        shared = self._shared
        if shared is None or shared[0] is not weight or shared[1] != key:
            quantized = _QuantizeForUses.apply(weight, self.format, *self.scaling)
            shared = [weight, key, quantized, self.uses]
        shared[3] -= 1
        self._shared = shared if shared[3] > 0 else None
        return shared[2]

    # ------------------------------------------------------------------- delayed scaling

    def prepare(self, module, weight):
        """Before a use: the state is there, and is that of these values."""
        if isinstance(weight, DTensor):
            raise NotImplementedError(
                'qshard: weights="dynamic" quantizes whole plain weights, and this one is a DTensor of '
                f"placements {weight.placements}; call qshard.quantize_(model, recipe) without it"
            )
        if not self.state:
            return
        if self.managed:
            return self.gradient.watch(weight)
        if self.is_cut or is_flattened(weight):
            raise RuntimeError(
                f"qshard: {self.format} weights that FSDP shards need the amaxes of all ranks; call "
                "qshard.prepare_for_fsdp1(model) after FullyShardedDataParallel(model), or, under "
                'fully_shard, qshard.quantize_(model, recipe) without weights="dynamic"'
            )
        if torch.compiler.is_compiling():
            return
        self.refresh(weight)
        if not torch.is_grad_enabled():
            return
        if not self._is_used:
            self._steps, self._is_used = _Steps.of_others, True
        if self.company is not None and not self._is_told:
            self._note_training()

    def _note_training(self, *_):
        self.company.trained.add(self._steps_told)

    def refresh(self, weight):
        """Brings the state up to date with values that no optimizer step made, if it is not."""
        if self.company is not None:
            refresh_all(_with_weights(self.company.take_to_refresh()))
        refresh_all([(self, weight)])

    def move_state(self, device):
        if self.state and self.state[0].device != device:
            self.state = [table.to(device) for table in self.state]

    def is_step_due(self, weight):
        """Whether copies of the weight were stepped since its history rolled. Ranks of groups
        have met for it."""
        if not weight.requires_grad or self._is_told:
            return False
        if self.company is not None:
            return self.is_due
        return self._is_used and self._steps != _Steps.of_others

    def is_stale(self, weight):
        is_untold = weight.requires_grad and not self._is_told
        return is_untold or self._seen != _seen(weight)

    def whole_weight(self):
        """The parameter itself, if it is there, for code that does not look, as what is compiled."""
        weight = self.owner._parameters.get("weight")
        is_whole = weight is not None and tuple(weight.shape) == self.shape
        is_ours = is_whole and not isinstance(weight, DTensor) and not weight.is_meta
        return weight if is_ours and not self.managed else None

    def refresh_owner(self):
        weight = self.whole_weight()
        if weight is not None:
            self.refresh(weight)


def is_flattened(weight: torch.Tensor | None) -> bool:
    """Whether a weight is a view of one of FSDP1's flat parameters, or, with use_orig_params, stands for one.
    torch marks both."""
    base = None if weight is None else weight._base
    return getattr(weight, "_fsdp_flattened", False) or getattr(base, "_is_flat_param", False)


def _note_cut(fsdp_param):
    where = fsdp_param._module_info
    dynamic = module_state.dynamic_of(where.module) if where.param_name == "weight" else None
    if dynamic is not None and not is_replicated(fsdp_param):
        dynamic.is_cut = True


of_package.note_cut = _note_cut


def _seen(weight):
    return 0 if weight.is_inference() else weight._version, weight.data_ptr()


def refresh_all(weights):
    """Brings the states of (DynamicWeight, its weight) up to date, without a collective. A weight that was
    not used in training since its history rolled was not stepped: the step was another model's."""
    due, stale = [], []
    for dynamic, weight in weights:
        if dynamic.is_step_due(weight):
            due.append((dynamic, weight.detach(), OF_IT))
        elif dynamic.is_stale(weight):
            stale.append((dynamic, weight.detach(), NO_STEP))
    for found_inf, members in _by_found_inf(due):
        _bring_up_to_date(members, Occasion.VALUES, found_inf)
    _bring_up_to_date(stale, Occasion.VALUES)
    for dynamic, _ in weights:
        dynamic.is_due = False


def _with_weights(dynamics):
    """(DynamicWeight, its weight) of those that have it whole."""
    weights = [(dynamic, dynamic.whole_weight()) for dynamic in dynamics]
    return [(dynamic, weight) for dynamic, weight in weights if weight is not None]


def _by_found_inf(weights):
    found = {}
    for weight in weights:
        company = weight[0].company
        found_inf = _Steps.found_inf if company is None else company.found_inf
        found.setdefault(id(found_inf), (found_inf, []))[1].append(weight)
    return found.values()


def flush(model):
    """`refresh_all` of a model's weights, after a step. Compiled uses do not say that they were: all count
    as used. Collective for weights of groups, which meet whether they were or not."""
    dynamics = {id(dynamic): dynamic for _, dynamic in module_state.dynamics_of(model)}
    weights = _with_weights([d for d in dynamics.values() if d.state])
    meeting = {}
    for dynamic, weight in weights:
        if dynamic._is_told or not weight.requires_grad:
            continue
        is_behind = dynamic._steps != _Steps.of_others
        dynamic._is_used = dynamic._is_used or is_behind
        if dynamic.company is not None:
            meeting.setdefault(dynamic.company, []).append((dynamic, is_behind))
    if ranks_meet(Occasion.FLUSH):
        for company, members in meeting.items():
            company.meet_in_flush(members, _Steps.found_inf)
    refresh_all(weights)


def _bring_up_to_date(weights, occasion, found_inf=None):
    """States of (DynamicWeight, its values, what this rank knows of a step that made them)."""
    if not weights:
        return
    dynamics, meets = [dynamic for dynamic, *_ in weights], ranks_meet(occasion)
    for dynamic, values, _ in weights:
        dynamic.move_state(values.device)
    ops._agree_on_ranges(
        [values.contiguous() for _, values, _ in weights],
        [dynamic.format for dynamic in dynamics],
        [number for dynamic in dynamics for number in (*dynamic.shape, 0)],
        [], [], [],
        [table for dynamic in dynamics for table in dynamic.state],
        [step for *_, step in weights],
        [dynamic.company.number if meets and dynamic.company else 0 for dynamic in dynamics],
        found_inf,
    )
    for dynamic, values, step in weights:
        dynamic._seen = _seen(values)
        if step != NO_STEP:
            dynamic._steps, dynamic._is_used = _Steps.of_others, False


delayed_weights = weakref.WeakSet()


def _after_step(optimizer, taken):
    """Histories of the optimizer's weights roll, in its order. What it writes after a step within its own
    is noticed as any write."""
    _Steps.all += 1
    known = {
        id(dynamic.owner._parameters.get("weight")): dynamic
        for dynamic in delayed_weights
        if not dynamic.managed and module_state.dynamic_of(dynamic.owner) is dynamic
    }
    if not known and not companies.have_trained():
        return
    stepped, written, holds_any = {}, {}, False
    for group in optimizer.param_groups:
        for param in group["params"]:
            dynamic = known.get(id(param))
            # As of a quantized weight: what has a gradient was written. Groups meet either way.
            if dynamic is None:
                continue
            holds_any = dynamic._steps_told.is_told = True
            is_first = id(param) not in taken
            is_written = (is_first and param.grad is not None) or dynamic._seen != _seen(param)
            if is_first and not synthetic_steps:
                if is_written or dynamic.company is not None:
                    step = OF_IT if is_written else STEP | HELD
                    stepped[id(dynamic)] = dynamic, param.detach(), step
            elif is_written:
                written[id(dynamic)] = dynamic, param.detach(), NO_STEP
    found_inf = getattr(optimizer, "found_inf", None)
    _bring_up_to_date(list(stepped.values()), Occasion.STEP, found_inf)
    _bring_up_to_date(list(written.values()), Occasion.VALUES)
    if not holds_any and not synthetic_steps:
        _Steps.of_others, _Steps.found_inf = _Steps.of_others + 1, found_inf
        companies.meet_after_step(found_inf)


of_package.roll_histories = _after_step


class _QuantizeForUses(torch.autograd.Function):
    """Rounding passes the gradient straight through."""

    @staticmethod
    def forward(ctx, weight, format, *state):
        ctx.inputs = 2 + len(state)
        return ops._quantize_for_uses(weight.detach(), format, list(state))

    @staticmethod
    def backward(ctx, grad):
        return grad, *[None] * (ctx.inputs - 1)
