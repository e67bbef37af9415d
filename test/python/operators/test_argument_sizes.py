"""Sizes, offsets and strides that no tensor has: each is refused by an error that names the operator; none
overflows, and none ends the process."""

import re

import pytest
import torch
from argument_values import FORMAT, planes, weight
from flat_ranges import agree, lists_of, messages_of
from forked import outcome, refusal
from qshard.gradients import message_bytes

ops = torch.ops.qshard
HUGE = 2**63 - 1
X = torch.randn(4, 48)
HEADS = torch.randn(2, 3, 4, 8)
TABLE = torch.randn(3, 8)


def messages(start, rows=4, cols=48):
    """FSDP1's, of a weight that begins at `start` of its flat parameter."""
    weight, scale, x = [(FORMAT, rows, cols, start)], [torch.ones(1, 1)], X[0].clone()
    return {
        "written": lambda: messages_of(x, 1, weight, scale),
        "read": lambda: ops._read_messages(
            torch.zeros(1, 64, dtype=torch.uint8), *lists_of(weight), scale, x
        ),
    }


SIZES = {
    "heads": lambda: ops.split_rotary_embedding(HEADS, TABLE, TABLE, [HUGE, HUGE, 2]),
    "heads of join": lambda: ops.join_rotary_embedding(
        HEADS, HEADS, HEADS, TABLE, TABLE, [1, HUGE, HUGE]
    ),
    "ranges of amaxes": lambda: agree([X[0]], [(FORMAT, 4, 48, HUGE - 5)]),
    "ranges of huge weights": lambda: agree([X[0]], [(FORMAT, 2**40, 2**40, 0)]),
    "amaxes of huge weights": lambda: agree(
        [X[0]], [("float8_blockwise", 2**30, 2**19, 0)] * 2, own=[torch.ones(1)] * 2
    ),
    "messages written": messages(HUGE - 5)["written"],
    "messages read": messages(HUGE - 5)["read"],
    "messages of huge weights": messages(0, rows=2**62, cols=2**62)["written"],
    "messages of many ranks": lambda: ops._write_message(X[0], 0, HUGE, [], [], [], torch.float32),
    "quantize": lambda: ops.quantize(X, FORMAT, row_offset=HUGE),
    "quantize of rows": lambda: ops.quantize(X, FORMAT, logical_rows=HUGE, row_offset=HUGE - 2),
    "quantize of all rows": lambda: ops.quantize(X, FORMAT, logical_rows=HUGE),
    "from_planes": lambda: ops.from_planes(*planes(), row_offset=HUGE),
    "from_planes of columns": lambda: ops.from_planes(*planes(), columns=HUGE),
    "_quantize_share": lambda: ops._quantize_share(
        X,
        FORMAT,
        keep_master=False,
        logical_rows=8,
        row_offset=0,
        rows_of_each=0,
        first_element=HUGE - 4,
        full_cols=HUGE,
        full_matrix_rows=0,
        groups=0,
    ),
    "message_bytes": lambda: message_bytes("float8", HUGE),
    "message_bytes of nvfp4": lambda: message_bytes("nvfp4", 2**62),
    "quantize_gradients": lambda: ops.quantize_gradients(X, "float8", 2**32, 2**33),
    "quantize_gradients of a chunk": lambda: ops.quantize_gradients(X, "float8", 1, HUGE),
    "quantize_gradients of no chunk": lambda: ops.quantize_gradients(X, "float8", -1, -1000),
    "quantize_gradients on meta": lambda: ops.quantize_gradients(
        X.to("meta"), "float8", 2**32, 2**33
    ),
    "sum_gradients": lambda: ops.sum_gradients(
        torch.zeros(1, 1, 16, dtype=torch.uint8), "float8", HUGE, torch.zeros(4)
    ),
    "_decode_activations": lambda: ops._decode_activations(
        torch.zeros(16, dtype=torch.uint8), FORMAT, False, [2**32, 2**32, 16], 0, torch.float32
    ),
    "_decode_activations of less": lambda: ops._decode_activations(
        torch.zeros(16, dtype=torch.uint8), FORMAT, False, [-4, -4, 16], 0, torch.float32
    ),
    "_decode_activations of no rows": lambda: ops._decode_activations(
        torch.zeros(64, dtype=torch.uint8),
        "float8_tensorwise",
        False,
        [2**62, 0, 16],
        0,
        torch.float32,
    ),
    "linear_backward_codes": lambda: ops.linear_backward_codes(
        *[torch.zeros(16, dtype=torch.uint8)] * 2,
        [2**32, 2**32, 64],
        torch.float32,
        weight(),
        X,
        False,
        True,
        True,
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_no_tensor_has_are_refused(name):
    assert "qshard::" in refusal(SIZES[name])


# Sizes that tensors may have and memory has not: the allocator's error says which call asked for it.
MEMORY = {
    "chunks": lambda: ops.quantize_gradients(X, "float8", 2**20, 2**29),
    "logical_rows": lambda: ops.quantize(X[:, :16], "float8_rowwise", logical_rows=2**50 // 16),  # a scale each
    "stride": lambda: ops.rotary_embedding(HEADS, TABLE, TABLE, stride=[2**45, 2**40, 2**30, 1]),
}


@pytest.mark.parametrize("name", MEMORY)
def test_an_allocation_that_fails_names_operator_and_arguments(name):
    kind, text = outcome(MEMORY[name])
    assert kind not in ("died", "returned"), (kind, text)
    assert re.search(f"qshard::.*{name}=", text), text


def test_overlapping_strides_of_a_result_are_refused():
    for stride in ([0, 0, 0, 1], [1, 1, 1, 1], [8, 8, 8, 1], [96, 32, 7, 1], [-96, 32, 8, 1]):
        text = refusal(lambda: ops.rotary_embedding(HEADS, TABLE, TABLE, stride=stride))
        assert "stride" in text
    for stride in ([96, 32, 8, 1], [8, 64, 16, 1], [1000, 100, 8, 1]):
        result = ops.rotary_embedding(HEADS, TABLE, TABLE, stride=stride)
        assert result.stride() == tuple(stride)
        assert torch.equal(result, ops.rotary_embedding(HEADS, TABLE, TABLE))
