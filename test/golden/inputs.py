"""Inputs of the golden digests: made by integer arithmetic, since the bits of torch.randn are
those of a version of torch and of a device."""

import torch

SIGN = 1 << 31
# Bits of NaN, infinity, and both with a minus.
SPECIAL = {
    torch.float32: (0x7FC00000, 0x7F800000, -0x400000, -0x800000),
    torch.bfloat16: (0x7FC0, 0x7F80, -0x40, -0x80),
    torch.float16: (0x7E00, 0x7C00, -0x200, -0x400),
}


def words(count, seed):
    """`count` numbers below 2^32 that look random: steps as of MurmurHash3's finalizer, by
    multipliers that leave products below 2^63."""
    x = torch.arange(count, dtype=torch.int64) * 40503 + seed * 1000003 + 1
    for shift, factor in ((16, 0x45D9F3B), (13, 0x2C1B3C6D), (16, 0x297A2D39)):
        x = (x ^ (x >> shift)) % 2**32 * factor % 2**32
    return x ^ (x >> 15)


def floats(bits):
    """The float32 numbers that have these bits, numbers below 2^32."""
    return torch.where(bits >= SIGN, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def exponents(count, seed, low, high):
    return low + words(count, seed + 500) % (high - low)


def values(*shape, kind="ordinary", seed=0, dtype=torch.float32):
    """Values of `shape`.

    ordinary: magnitudes of 2^-8 to 2^8, and zeros of both signs. special: the same, with NaN and
    infinity of both signs. subnormal: from 2^-149 to 2^-124. huge: of all exponents. zeros: of
    both signs.
    """
    count = torch.Size(shape).numel()
    mixed = words(count, seed)
    mantissa, sign = mixed % (1 << 23), (mixed >> 23) % 2 * SIGN
    low, high = {"subnormal": (0, 4), "huge": (1, 255)}.get(kind, (119, 135))
    bits = sign + (exponents(count, seed, low, high) << 23) + mantissa
    place = torch.arange(count)
    bits = torch.where((place % 11 == 3) | (kind == "zeros"), sign, bits)
    result = floats(bits).to(dtype)
    if kind == "special":
        # After the conversion, which makes one NaN of all on some processors.
        as_integers = result.view(torch.int32 if dtype == torch.float32 else torch.int16)
        for at, special in enumerate(SPECIAL[dtype]):
            # A prime distance, so that some blocks of every format hold one and others none.
            as_integers[100 * at + 7 :: 1009] = special
    return result.view(shape)


def short(*shape, seed=0, largest=None):
    """float32 multiples of 1/8 in [-2, 2]. Sums of products of them are exact: results show
    neither an order of summation nor a fused multiply-add. `largest`: the first value
    instead."""
    result = ((words(torch.Size(shape).numel(), seed) % 33 - 16).to(torch.float32) / 8).view(shape)
    if largest is not None:
        result.view(-1)[0] = largest
    return result


def largest_of(format):
    """An amax that makes the format's fp32 scales powers of two, so that sums of products of
    quantized `short` values are exact, too."""
    return 2.625 if format.startswith("nvfp4") else 3.5
