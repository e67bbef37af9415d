"""Tokens in codes under torchtitan 0.2's ExpertParallel, for experts that are marked for it.

ExpertParallel is made within torchtitan's parallelize function, which has no place for another one, so its two
exchanges ask here first:
https://github.com/pytorch/torchtitan/blob/v0.2.2/torchtitan/distributed/expert_parallel.py"""

import functools

import torch
from torch import nn

from qshard import module_state
from qshard.experts import exchange, stacks
from qshard.experts.known import is_of_torchtitan

from torchtitan.distributed.expert_parallel import ExpertParallel

_NAME = "quantize.qshard.tokens"


def send_tokens_in_codes(model: nn.Module) -> None:
    """Marks the experts of a model whose stacks are quantized."""
    for module in filter(is_of_torchtitan, model.modules()):
        if stacks.is_quantized_stack(module, "w1"):
            module_state.of(module).sends_tokens_in_codes = True


def _dispatch(module: nn.Module, rows: torch.Tensor, counts: torch.Tensor, mesh) -> tuple[torch.Tensor, torch.Tensor]:
    """rows (N, K), sorted by expert, and counts (experts of all ranks,) of them, to this rank's (rows, counts)."""
    group, experts, state = exchange.group_name(mesh), len(counts), module_state.of(module)

    def prepare():
        format = exchange.row_format(stacks.message_format(module, "w1"), _NAME)
        numbers = torch.cat([counts, len(rows) - counts.sum(0, keepdim=True)])
        return exchange.Numbers(numbers.long(), (rows.shape[1], rows.dtype, format)), format

    found, _, format = exchange.agree(_NAME, experts, group, rows.device, prepare)
    state.exchange = found, format
    rows = exchange.to_experts(rows, found, format)
    state.tokens_sent = exchange.bytes_sent(found, rows)
    return rows, found.counts


def _combine(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """What the experts made of those rows, back to the ranks that sent them."""
    state = module_state.of(module)
    found, format = state.exchange
    state.forget("exchange")
    return exchange.from_experts(rows, found, format)


def _ask_first():
    stock_dispatch, stock_combine = ExpertParallel._token_dispatch, ExpertParallel._token_combine

    @functools.wraps(stock_dispatch)
    def _token_dispatch(self, mod, inputs, device_mesh):
        is_marked = module_state.find(mod).sends_tokens_in_codes
        return _dispatch(mod, *inputs, device_mesh) if is_marked else stock_dispatch(self, mod, inputs, device_mesh)

    @functools.wraps(stock_combine)
    def _token_combine(self, mod, routed_output, device_mesh):
        is_marked = module_state.find(mod).sends_tokens_in_codes
        return _combine(mod, routed_output) if is_marked else stock_combine(self, mod, routed_output, device_mesh)

    ExpertParallel._token_dispatch, ExpertParallel._token_combine = _token_dispatch, _token_combine


_ask_first()
