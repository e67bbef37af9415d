"""Messages that carry gradients: [codes | scales of blocks | fp32 scales of tiles], each padded to 16
bytes, and their sum.

Missing values are zeros. A block of zeros has scale 1; one with NaN or infinity has scale NaN and reads
as NaN throughout. nvfp4: a tile of 4096 values has the scale of a whole matrix in row_scales.py, from
the amax of its blocks that are finite. Sums are in fp32, in the order of ranks, times a factor, rounded
once; NaN is positive and quiet.

Stochastic rounding: values 16 k to 16 k + 15 share Philox 4x32-7 of the counter k, four of them a word.
Value j of these four has 24 bits of noise: byte j of the word, the next and the one after that, the word
taken as a ring. Its product with the scale, in exact arithmetic, goes up where 1 - noise is at most its
distance from the lower code, in steps; fp32's mantissa below the code's is what noise and distance have.
"""

from dataclasses import dataclass

import torch

from . import float4, formats, row_scales, stochastic

TILE = 4096
NAN_BITS = {
    torch.float32: (torch.int32, 0x7FC00000),
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float16: (torch.int16, 0x7E00),
}


@dataclass(frozen=True)
class MessageFormat:
    block: int
    code_bits: int
    tile_scale: bool = False


FORMATS = {
    "float8": MessageFormat(128, 8),
    "mxfp8": MessageFormat(32, 8),
    "nvfp4": MessageFormat(16, 4, tile_scale=True),
}


def padded(bytes: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(bytes, (0, -len(bytes) % 16))


def parts(fmt: str, n: int) -> list[int]:
    """Bytes of each part."""
    format = FORMATS[fmt]
    sizes = [-(-n * format.code_bits // 8), -(-n // format.block)]
    sizes.append(4 * -(-n // TILE) if format.tile_scale else 0)
    return [-(-size // 16) * 16 for size in sizes]


def message_bytes(fmt: str, n: int) -> int:
    return sum(parts(fmt, n))


def scales_of(blocks: torch.Tensor, format: MessageFormat):
    """(bytes of the blocks, what their values are multiplied by, fp32 scale_inv of the tiles)."""
    amax = blocks.abs().amax(1)
    finite = amax.isfinite()
    if not format.tile_scale:
        byte, scale = row_scales.mxfp8_scales(torch.where(finite, amax, float("nan")))
        byte[amax == 0] = 127
        return byte, scale, None
    per_tile = TILE // format.block
    tiles = -(-len(blocks) // per_tile)
    known = torch.where(finite, amax, 0.0)
    known = torch.nn.functional.pad(known, (0, tiles * per_tile - len(blocks)))
    scale_inv = row_scales.nvfp4_tensor_scale_inv(known.view(tiles, per_tile).amax(1))
    of_block = scale_inv.repeat_interleave(per_tile)[: len(blocks)]
    byte, scale = row_scales.nvfp4_scales(torch.where(finite, amax, float("nan")), of_block)
    byte[amax == 0] = 0x38
    scale[amax == 0] = 1.0
    return byte, scale, scale_inv


def noise(key: int, count: int, first: int, n: int) -> torch.Tensor:
    """24 bits for each of the values [first, first + n), `first` a multiple of 16."""
    counter = first // 16 + torch.arange(-(-n // 16))
    zero = torch.zeros_like(counter)
    counters = [counter & stochastic.WORD, counter >> 32, zero + count, zero]
    words = torch.stack(stochastic.philox(counters, key, rounds=7), 1)
    ring = torch.stack([words >> 8 * j & 0xFF for j in range(4)], 2)
    bytes = [ring.roll(-j, 2) for j in range(3)]
    return (bytes[0] << 16 | bytes[1] << 8 | bytes[2]).flatten()[:n]


def encode(values: torch.Tensor, fmt: str, noise: torch.Tensor | None = None) -> torch.Tensor:
    """The uint8 message of one chunk of values; `noise`: its values', for stochastic rounding."""
    format, n = FORMATS[fmt], len(values)
    size = parts(fmt, n)
    count = size[1]  # of blocks, padding included
    blocks = torch.nn.functional.pad(values.float(), (0, count * format.block - n))
    blocks = blocks.view(count, format.block)
    byte, scale, scale_inv = scales_of(blocks, format)
    each = scale[:, None].expand_as(blocks).flatten()[:n]
    values = values.float()
    if noise is not None:
        known = formats.FORMATS["nvfp4" if format.tile_scale else "mxfp8"]
        scaled = values.double().abs() * each.double()
        bits = 22 if format.code_bits == 4 else 20
        draw = (2**bits - 1 - (noise >> (24 - bits))).double() / 2**bits
        codes = stochastic.round_codes(values, scaled, draw, known)
    elif format.code_bits == 4:
        codes = float4.encode(values, each)
    else:
        codes = formats.encode(values, each, torch.float8_e4m3fn)
    if format.code_bits == 4:
        codes = float4.pack(codes[None])[0]
    message = [padded(codes), byte]
    if format.tile_scale:
        message.append(padded(scale_inv[: -(-n // TILE)].view(torch.uint8)))
    return torch.cat(message)


def decode(message: torch.Tensor, fmt: str, n: int) -> torch.Tensor:
    """fp32 values of a message."""
    format = FORMATS[fmt]
    codes, scales, tiles = message.split(parts(fmt, n))
    if format.code_bits == 4:
        values = float4.decode(float4.unpack(codes[None], 2 * len(codes))[0])[:n]
        tile_scale = tiles.clone().view(torch.float32).repeat_interleave(TILE // format.block)
        scales = scales[: len(tile_scale)]
        scale_inv = row_scales.nvfp4_block_scale_inv(scales, tile_scale[: len(scales)])
    else:
        values = formats.decode(codes)[:n]
        scale_inv = row_scales.e8m0_to_float(scales)
    return values * scale_inv.repeat_interleave(format.block)[:n]


def total(messages: list[torch.Tensor], fmt: str, n: int, factor: float, dtype: torch.dtype):
    """What ranks sent, in their order, summed."""
    sum = decode(messages[0], fmt, n)
    for message in messages[1:]:
        sum = sum + decode(message, fmt, n)
    sum = sum * torch.tensor(factor, dtype=torch.float32)
    rounded = sum.to(dtype)
    rounded.view(NAN_BITS[dtype][0])[sum.isnan()] = NAN_BITS[dtype][1]  # `to` keeps signs, or sets them
    return rounded
