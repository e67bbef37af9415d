"""Values of rows as ranks send them in codes: of all sizes, some of zeros, and what is not finite."""

import pytest
import torch

ROWS, WHOLE_ROWS, ROWS_OF_MX = "float8_1x128", "float8_1xK", "mxfp8_1x32[rowwise]"  # the formats
# By the formats of weights.
ROW_FORMAT = {
    "float8_tensorwise": WHOLE_ROWS, "float8_rowwise": WHOLE_ROWS, "float8_blockwise": ROWS, "mxfp8": ROWS_OF_MX
}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ON_DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])


def values(rows, columns, dtype=torch.float32, seed=0):
    """Rows of all sizes, some of zeros, and one with what is not finite."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= 2.0 ** torch.randint(-12, 8, (rows, 1), generator=generator)
    x[:, ::7] *= 2.0**-9  # codes of few bits
    if rows > 8:
        x[2], x[3, : columns // 2] = 0, 0
        x[4] *= 2.0**-100
        x[5] = -0.0
    x[128:256] *= 2.0**-12  # whose scales are below that of zeros
    x[130:131] = 0
    return x.to(dtype)


def odd_values(rows, columns):
    x = values(rows, columns)
    x[0, 0], x[6, -1], x[7, columns // 2] = float("nan"), float("inf"), -float("nan")
    x[8] = torch.finfo(torch.float32).max
    x[9] = torch.finfo(torch.float32).smallest_normal / 8
    return x


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)
