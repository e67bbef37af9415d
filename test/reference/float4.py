"""E2M1 codes: four bits, two to a byte, the first in the low nibble."""

import torch

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; codes 8 to 15 are negative


def encode(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """uint8 codes of x * scale: nearest, ties to the even code, saturating at 6.

    NaN is 7; the sign is kept, NaN's and zero's too.
    """
    x = x.float()
    scaled = (x * scale).abs()
    code = torch.zeros(x.shape, dtype=torch.uint8)
    for lower, (a, b) in enumerate(zip(VALUES, VALUES[1:])):
        tie = (a + b) / 2
        goes_up = scaled > tie if lower % 2 == 0 else scaled >= tie
        code += goes_up.to(torch.uint8)
    code[x.isnan()] = 7
    return code | (x.signbit().to(torch.uint8) << 3)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of codes."""
    return torch.tensor(VALUES + tuple(-v for v in VALUES))[codes.int()]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """(rows, cols) codes as (rows, ceil(cols / 2)) bytes; a missing last code is 0."""
    codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack(packed: torch.Tensor, cols: int) -> torch.Tensor:
    """The reverse of pack."""
    return torch.stack([packed & 0xF, packed >> 4], dim=2).flatten(1)[:, :cols]
