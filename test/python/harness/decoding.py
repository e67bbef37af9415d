"""What codes and scales stand for, by the formulas of their formats' papers and in no words of qshard's."""

import torch


def e4m3(byte: int) -> float:
    """OCP FP8: 1 sign, 4 exponent bits of bias 7, 3 mantissa bits."""
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = torch.tensor([e4m3(byte) for byte in range(256)])
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E8M0 = torch.tensor([*(2.0 ** (byte - 127) for byte in range(255)), float("nan")])


def _of(table, tensor):
    return table.to(tensor.device)[tensor.contiguous().view(torch.uint8).long()]


def codes_of(tensor):
    """E4M3 of one byte, or two of E2M1, the even column in the low nibble."""
    if tensor.dtype == torch.float8_e4m3fn:
        return _of(E4M3, tensor)
    pairs = torch.stack([tensor & 15, tensor >> 4], -1).flatten(1)
    return _of(E2M1, pairs)


def scales_of(tensor, format):
    """fp32, E8M0 (as such or as bytes), or E4M3 of NVFP4."""
    if tensor.dtype == torch.float32:
        return tensor
    return _of(E4M3 if format.startswith("nvfp4") else E8M0, tensor)


def decoded(planes, format):
    """fp32 of the tensors of a weight, {suffix: tensor}."""
    planes = dict(planes)
    codes = codes_of(planes.pop("weight", planes.pop("weight_packed", None)))
    scale_name = "weight_scale_inv" if "weight_scale_inv" in planes else "weight_scale"
    scale = scales_of(planes.pop(scale_name), format)
    if scale.numel() == 1:
        scale = scale.reshape(1, 1)
    rows, columns = codes.shape
    blocks = {
        "float8_blockwise": (128, 128),
        "float8_rowwise": (1, columns),
        "mxfp8": (1, 32),
        "nvfp4": (1, 16),
    }
    block = next((size for name, size in blocks.items() if format.startswith(name)), (rows, columns))
    scale = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]
    if "weight_scale_2" in planes:
        scale = scale * planes.pop("weight_scale_2").reshape(1, 1)
    if "weight_global_scale" in planes:  # divides
        scale = scale / planes.pop("weight_global_scale").reshape(1, 1)
    assert not planes
    return codes * scale


def assert_same_bits(got, want, what=""):
    """NaNs are one value."""
    assert got.dtype == want.dtype and got.shape == want.shape, (what, got.shape, want.shape)
    assert torch.equal(got.isnan(), want.isnan()), what
    got, want = (torch.nan_to_num(t, nan=1.0) for t in (got, want))
    assert torch.equal(got, want) and torch.equal(got.signbit(), want.signbit()), what


