"""An embedding whose weight may be quantized."""

import torch

from qshard import module_state


class Embedding(torch.nn.Embedding):
    """nn.Embedding whose weight is a quantized linear's, too; `quantize_` turns nn.Embedding into it.
    It looks up what the linear multiplies by: dequantized codes."""

    _qshard = module_state.NOTHING  # its ModuleState, as of Linear

    def extra_repr(self) -> str:
        return super().extra_repr() + self._qshard.shown_format(self)

    def __setstate__(self, state):
        super().__setstate__(state)
        module_state.migrate(self)  # as Initialized

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Indices of any shape -> (..., embedding_dim)."""
        dynamic = self._qshard.dynamic
        if dynamic is not None:
            return dynamic.embedding(self, input)
        return super().forward(input)
