"""experts_implementation="qshard" of transformers: experts by `swiglu_experts`, or `grouped_linear`."""

import sys

import torch
from torch import nn

from qshard import module_state
from qshard.experts import stacks
from qshard.modules.made_classes import plain_forward
from qshard.nn.parts.grouped import PickRows, ends_of, inverse_of
from qshard.nn.parts.known_activations import know_activations, name_now

NAME = "qshard"


def register() -> None:
    """Makes "qshard" one of transformers' experts_implementation, and of its ep_implementation."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    know_activations()
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError:  # earlier versions have no other ways to dispatch tokens
        return
    from qshard.experts.transformers_parallel import TokensInCodes

    EPImplementationInterface.register(NAME, TokensInCodes)


def runs_as_experts(cls: type) -> bool:
    """Whether transformers' use_experts_implementation has given a class its forward, which calls what
    experts_implementation names."""
    moe = sys.modules.get("transformers.integrations.moe")
    return moe is not None and getattr(plain_forward(cls), "__globals__", None) is vars(moe)


def has_halves(cls: type) -> bool:
    """Whether a class that runs_as_experts multiplies `act_fn` of one half of each row by the other half."""
    from transformers.integrations.moe import _default_apply_gate

    return getattr(cls, "_apply_gate", None) is _default_apply_gate


def is_swiglu(module: nn.Module) -> bool:
    """Whether experts compute down(silu(gate(x)) * up(x)) and nothing else, with gate and up in one stack (experts,
    out, in)."""
    options = ("has_bias", "is_transposed", "has_post_expert_norm")
    is_usual = getattr(module, "has_gate", True) and not any(getattr(module, name, False) for name in options)
    return is_usual and has_halves(type(module)) and name_now(module.act_fn) == "swiglu"


def is_one_operator(module: nn.Module) -> bool:
    """Whether `experts_forward` runs the experts by one operator."""
    return is_swiglu(module) and all(stacks.is_quantized_stack(module, name) for name in ("gate_up_proj", "down_proj"))


def is_chosen(module: nn.Module) -> bool:
    """Whether experts of transformers run by the function below: experts_implementation names it, or fuse_ made their
    class."""
    return _is_named(module) or _is_fused(module)


def _is_named(module):
    return getattr(module.config, "_experts_implementation", None) == NAME


def _is_fused(module):
    return type(module).forward is not plain_forward(type(module))


def prepare(module: nn.Module, weight_only: bool) -> None:
    """Makes "qshard" known for experts whose stacks were quantized. With weight_only they say so if they are to run by
    another implementation, which cannot leave activations as they are."""
    register()
    state = module_state.of(module)
    state.remove_hooks("weight_only")
    if weight_only:
        state.add_hooks("weight_only", lambda: [module.register_forward_pre_hook(_refuse_others)])


def _refuse_others(module, *_):
    if not (_is_named(module) or (_is_fused(module) and is_one_operator(module))):
        raise RuntimeError(
            f"qshard: {type(module).__name__} was quantized with weight_only=True, which experts_implementation="
            f'"{module.config._experts_implementation}" would ignore; call model.set_experts_implementation("{NAME}")'
        )


def experts_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The forward of an experts module of transformers. hidden_states: (T, H); top_k_index, top_k_weights: (T, k),
    where numbers from num_experts on, of experts on other ranks, add nothing. The host never waits for the device,
    and torch.compile finds one graph. Where no stack is quantized this is transformers' "grouped_mm"."""
    first = first_name(self)
    if not (stacks.is_quantized_stack(self, first) or stacks.is_quantized_stack(self, "down_proj")):
        return _plain_forward(self, hidden_states, top_k_index, top_k_weights)
    top_k = top_k_index.shape[-1]
    ids, order = torch.sort(top_k_index.reshape(-1))  # as transformers' own: rows in another order have other bits
    offs = ends_of(ids, self.num_experts)
    places = inverse_of(order)

    x = PickRows.apply(hidden_states, order // top_k, places, top_k)
    x = rows_forward(self, x, offs)
    x = PickRows.apply(x, places, order, 1).unflatten(0, (-1, top_k))
    return (x * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def rows_forward(module: nn.Module, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """What experts make of rows (R, H) that lie expert by expert, before the weights of tokens multiply it."""
    first = first_name(module)
    y = stacks.swiglu(module, x, first, None, "down_proj", offs) if is_swiglu(module) else None
    x = _by_steps(module, x, first, offs) if y is None else y
    return module.post_expert_norm(x) if getattr(module, "has_post_expert_norm", False) else x


def first_name(module: nn.Module) -> str:
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"


def _by_steps(module, x, first, offs):
    x = _multiply(module, x, first, offs)
    x = module._apply_gate(x) if getattr(module, "has_gate", True) else module.act_fn(x)
    return _multiply(module, x, "down_proj", offs)


def _plain_forward(module, *args):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, *args)


def _multiply(module, x, name, offs):
    bias = getattr(module, f"{name}_bias") if getattr(module, "has_bias", False) else None
    return stacks.multiply(module, x, name, offs, bias, getattr(module, "is_transposed", False))
