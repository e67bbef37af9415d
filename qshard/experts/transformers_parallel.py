"""ep_implementation="qshard" of transformers: tokens travel in codes to the ranks of their experts."""

import functools
import warnings

from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import AllToAllEP, AutoEP

from qshard import module_state
from qshard.experts import stacks, transformers
from qshard.experts.token_dispatcher import TokenDispatcher
from qshard.nn.parts.grouped import ends_of_counts


class TokensInCodes(AutoEP):
    """transformers' "auto", which sends tokens in training and wherever the ranks hold different batches, but in the
    codes that quantized experts multiply."""

    def __init__(self, experts, ep_mesh, tp_mesh):
        super().__init__(experts, ep_mesh, tp_mesh)
        self.all_to_all = _AllToAll(experts, ep_mesh, tp_mesh)


class _AllToAll(AllToAllEP):
    def __init__(self, experts, ep_mesh, tp_mesh):
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        self.dispatcher = TokenDispatcher(self.num_local_experts * ep_mesh.size(), ep_mesh)

    def __call__(self, hidden_states, top_k_index, top_k_weights):
        experts = self.experts
        if not transformers.is_chosen(experts):
            _warn_of_values(experts.config._experts_implementation)
            return super().__call__(hidden_states, top_k_index, top_k_weights)
        given = hidden_states, top_k_index, top_k_weights
        x, ids, weights = map(self._own_slice, given) if self.tp_mesh.size() > 1 else given
        format = stacks.message_format(experts, transformers.first_name(experts))
        rows, counts, routes = self.dispatcher.dispatch(x, ids, format)
        module_state.of(experts).tokens_sent = module_state.find(self.dispatcher).tokens_sent
        y = transformers.rows_forward(experts, rows, ends_of_counts(counts))
        y = self.dispatcher.combine(y, routes, weights)
        if self.tp_mesh.size() == 1:
            return y
        shape = hidden_states.shape
        y = DTensor.from_local(y.contiguous(), self.tp_mesh, [Shard(0)], shape=shape, stride=(shape[1], 1))
        return y.full_tensor()

    def _own_slice(self, x):
        """What AllToAllEP sends of a batch that the ranks of tensor parallelism share."""
        whole = DTensor.from_local(x, self.tp_mesh, [Replicate()], run_check=False)
        return whole.redistribute(self.tp_mesh, [Shard(0)]).to_local()


@functools.cache
def _warn_of_values(implementation):
    warnings.warn(
        f'ep_implementation="{transformers.NAME}": experts_implementation="{implementation}" multiplies values, so '
        f'tokens are sent as values; call model.set_experts_implementation("{transformers.NAME}")',
        stacklevel=2,
    )
