"""experts_implementation="qshard" of transformers: experts by `grouped_linear`."""

import torch
from torch import nn

from qshard import module_state
from qshard._runtime.hooks import is_quantized
from qshard.nn.parts.grouped import PickRows, ends_of, grouped_linear

NAME = "qshard"


def register() -> None:
    """Makes "qshard" one of transformers' experts_implementation."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def is_chosen(module: nn.Module) -> bool:
    """Whether experts of transformers run by the function below."""
    return getattr(module.config, "_experts_implementation", None) == NAME


def keep_weight_only(module: nn.Module) -> None:
    """Has experts say so if they are to run by another implementation, which cannot leave activations as they are."""
    state = module_state.of(module)
    state.add_hooks("weight_only", lambda: [module.register_forward_pre_hook(_refuse_others)])


def _refuse_others(module, *_):
    if not is_chosen(module):
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
    has_gate = getattr(self, "has_gate", True)
    first = "gate_up_proj" if has_gate else "up_proj"
    if not (_is_quantized(self, first) or _is_quantized(self, "down_proj")):
        return _plain_forward(self, hidden_states, top_k_index, top_k_weights)
    top_k = top_k_index.shape[-1]
    ids, order = torch.sort(top_k_index.reshape(-1), stable=True)
    offs = ends_of(ids, self.num_experts)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)

    x = PickRows.apply(hidden_states, order // top_k, places, top_k)
    x = _multiply(self, x, first, offs)
    x = self._apply_gate(x) if has_gate else self.act_fn(x)
    x = _multiply(self, x, "down_proj", offs)
    if getattr(self, "has_post_expert_norm", False):
        x = self.post_expert_norm(x)
    x = PickRows.apply(x, places, order, 1).unflatten(0, (-1, top_k))
    return (x * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def _plain_forward(module, *args):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, *args)


def _format(module, name):
    """The format of a stack, as quantize_ noted it."""
    return (module_state.current(module).weight_formats or {}).get(name)


def _is_quantized(module, name):
    return _format(module, name) is not None or is_quantized(getattr(module, name))


def _multiply(module, x, name, offs):
    weight = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if getattr(module, "has_bias", False) else None
    return grouped_linear(
        x,
        weight.mT if getattr(module, "is_transposed", False) else weight,
        offs,
        bias,
        is_quantized=_is_quantized(module, name),
        weight_only=module_state.current(module).weight_only,
        weight_format=_format(module, name),
    )
