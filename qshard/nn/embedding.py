"""An embedding whose weight may be quantized."""

import torch

from qshard._runtime.hooks import holds_codes, local_of
from qshard import module_state


class Embedding(torch.nn.Embedding):
    """nn.Embedding whose weight is a quantized linear's, too; `quantize_` turns nn.Embedding into it.
    It looks up what the linear multiplies by: dequantized codes."""

    _qshard = module_state.NOTHING  # its ModuleState, as of Linear

    def extra_repr(self) -> str:
        dynamic, local = self._qshard.dynamic, local_of(self.weight)
        if dynamic is not None:
            return f"{super().extra_repr()}, format={dynamic.format} at each use"
        if holds_codes(local):
            return f"{super().extra_repr()}, format={torch.ops.qshard.format(local)}"
        return super().extra_repr()

    def __setstate__(self, state):
        super().__setstate__(state)
        module_state.migrate(self)  # as Initialized

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Indices of any shape -> (..., embedding_dim)."""
        dynamic = self._qshard.dynamic
        if dynamic is not None:
            return dynamic.embedding(self, input)
        return super().forward(input)
