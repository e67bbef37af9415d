"""torchtitan 0.3's dispatcher of tokens, with the exchanges of experts in codes."""

from dataclasses import dataclass, fields

import spmd_types
import torch
from qshard.experts import exchange
from qshard.experts.exchange import Exchange

from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

_NAME = 'QShardConverter(tokens="codes")'


class TokensInCodes(AllToAllTokenDispatcher):
    """AllToAllTokenDispatcher whose tokens, and gradients of what the experts made of them, are sent in the codes that
    meet weights of a format. It sends values where a compiler traces it, or torchtitan checks types of placements."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        weight_format: str

    def __init__(self, config: Config):
        super().__init__(config)
        self.format = exchange.row_format(config.weight_format, _NAME)
        self.state = None  # the ModuleState of the experts, once quantized

    def _dispatch_token_exchange(self, routed_input_ND, pg, output_splits, input_splits):  # noqa: N803
        if _is_looked_into():
            return super()._dispatch_token_exchange(routed_input_ND, pg, output_splits, input_splits)
        found = Exchange(pg.group_name, input_splits, output_splits)
        rows = exchange.to_experts(routed_input_ND, found, self.format)
        if self.state is not None:
            self.state.tokens_sent = exchange.bytes_sent(found, rows)
        return rows

    def _combine_token_exchange(self, routed_output_RD, pg, input_splits, output_splits):  # noqa: N803
        if _is_looked_into():
            return super()._combine_token_exchange(routed_output_RD, pg, input_splits, output_splits)
        found = Exchange(pg.group_name, input_splits, output_splits)
        return exchange.from_experts(routed_output_RD, found, self.format)


def _is_looked_into():
    is_traced = torch.compiler.is_compiling() or torch.compiler._is_non_strict_tracing()
    return is_traced or spmd_types.is_type_checking()


def choose(routed_experts: RoutedExperts.Config, quantization) -> None:
    """Gives routed experts the dispatcher that a converter's options name. Raises ValueError where they have none of
    torchtitan's that this one replaces."""
    stock = routed_experts.token_dispatcher
    if type(stock) not in (AllToAllTokenDispatcher.Config, TokensInCodes.Config):
        if quantization.tokens == "codes":
            raise ValueError(
                f"{_NAME} replaces AllToAllTokenDispatcher, and this model has {type(stock).__qualname__}; leave "
                "tokens out"
            )
        return
    values = {f.name: getattr(stock, f.name) for f in fields(AllToAllTokenDispatcher.Config) if f.init}
    if quantization.tokens == "codes":
        routed_experts.token_dispatcher = TokensInCodes.Config(**values, weight_format=quantization.recipe)
    else:
        routed_experts.token_dispatcher = AllToAllTokenDispatcher.Config(**values)
