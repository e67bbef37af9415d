"""What the tests of operators' arguments give to operators."""

import torch

ops = torch.ops.qshard
FORMAT = "float8_blockwise"


def weight(format=FORMAT, rows=64, cols=48, **kwargs):
    return ops.quantize(torch.randn(rows, cols), format, **kwargs)


def planes():
    return torch.zeros(4, 48, dtype=torch.float8_e4m3fn), torch.ones(1, 1), FORMAT
