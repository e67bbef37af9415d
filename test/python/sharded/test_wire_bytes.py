"""What ranks and processes send one another has no bytes that nothing has written."""

import pytest
import torch
from helpers import FORMATS

from qshard._runtime.classes import TensorState
from qshard.formats import info_of

ops = torch.ops.qshard


@pytest.mark.parametrize("is_gradient", [False, True])
@pytest.mark.parametrize("format", ["float8_tensorwise", "float8_blockwise", "mxfp8"])
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_messages_have_no_bytes_of_earlier_owners(format, rows, is_gradient):
    x = torch.randn(rows, 40)
    amax = ops._message_amax(x, format)
    messages = []
    for value in (0xA5, 0x5A):
        for extra in range(-64, 65):  # freed blocks of all sizes near the message's
            torch.full((rows * 48 + 80 + extra,), value, dtype=torch.uint8)
        messages.append(ops._encode_activation(x, format, is_gradient, amax))
    assert torch.equal(*messages)
    if format != "mxfp8":
        assert messages[0][rows * 48 + 4 * (1 if "tensor" in format else rows) :].eq(0).all()


@pytest.mark.parametrize("format", [f for f in FORMATS if info_of(f).gemm.scale_mode != "1x32"])
def test_shared_codes_have_no_bytes_of_earlier_owners(format):
    q = ops.quantize(torch.randn(61, 48), format, keep_master=True)  # 12 bytes pad a grid
    nbytes = TensorState(q).shared_planes()[1].numel()
    for _ in range(8):
        # Freed blocks of that size, one of which is the image's that nothing fills.
        blocks = [torch.full((nbytes,), 0xA5, dtype=torch.uint8) for _ in range(64)]
        del blocks
        copy = q.to(torch.bfloat16)
        assert TensorState(copy).shared_planes()[1][-12:].eq(0).all()


def test_the_amax_of_an_empty_tensor_is_zero():
    for shape in ((0, 48), (4, 0), (0, 3, 16)):
        torch.full((1000,), float("nan"))  # what the allocator gives next
        amax = ops._message_amax(torch.empty(shape), "float8_tensorwise")
        assert amax.tolist() == [0.0], shape
