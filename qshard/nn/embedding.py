"""An embedding whose weight may be quantized."""

import torch


class Embedding(torch.nn.Embedding):
    """nn.Embedding whose weight is a quantized linear's, too; `quantize_` turns nn.Embedding into it.
    It looks up what the linear multiplies by: dequantized codes."""

    dynamic = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Indices of any shape -> (..., embedding_dim)."""
        if self.dynamic is not None:
            return self.dynamic.embedding(self, input)
        return super().forward(input)
