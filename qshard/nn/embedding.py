"""An embedding whose weight may be quantized."""

import torch
from _qshard_hooks import is_quantized, local_of

from qshard import module_state


class Embedding(torch.nn.Embedding):
    """nn.Embedding whose weight is a quantized linear's, too; `quantize_` turns nn.Embedding into it.
    It looks up what the linear multiplies by: dequantized codes."""

    _qshard = None  # its ModuleState, as of Linear

    def extra_repr(self) -> str:
        dynamic, local = module_state.dynamic_of(self), local_of(self.weight)
        if dynamic is not None:
            return f"{super().extra_repr()}, format={dynamic.format} at each use"
        if is_quantized(local):
            return f"{super().extra_repr()}, format={torch.ops.qshard.format(local)}"
        return super().extra_repr()

    def __setstate__(self, state):
        super().__setstate__(state)
        module_state.find(self)  # as Initialized

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Indices of any shape -> (..., embedding_dim)."""
        state = self._qshard
        if state is not None and state.dynamic is not None:
            return state.dynamic.embedding(self, input)
        return super().forward(input)
