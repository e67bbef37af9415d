"""The 16-point random Hadamard transform of NVFP4's wgrad operands.

y = H diag(s) x / 4 for each 16 values, with Sylvester's matrix H and fixed signs s. It is orthonormal,
so two transformed operands have the product that they had before.
"""

import torch

SIGNS = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], dtype=torch.float32)


def matrix() -> torch.Tensor:
    """The transform as a (16, 16) matrix, exact in fp32."""
    h = torch.ones(1, 1)
    while len(h) < 16:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h * SIGNS / 4


def random_hadamard(x: torch.Tensor) -> torch.Tensor:
    """Transforms the last dimension, 16 long: fp32 sums over distances 1, 2, 4, 8, then the 1/4."""
    y = x.float() * SIGNS
    for distance in (1, 2, 4, 8):
        pairs = y.unflatten(-1, (-1, 2, distance))
        a, b = pairs.unbind(-2)
        y = torch.stack([a + b, a - b], -2).flatten(-3)
    return (y / 4).to(x.dtype)


def transposed(x: torch.Tensor, hadamard: bool) -> torch.Tensor:
    """x (M, K) -> (K, M rounded up to 32), zeros beyond M."""
    y = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 32)).t().contiguous()
    return random_hadamard(y.unflatten(1, (-1, 16))).flatten(1) if hadamard and len(y) else y
