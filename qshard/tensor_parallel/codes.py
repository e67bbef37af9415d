"""All-gathers of activations and gradients that move codes and scales, not values.

What arrives is, bit for bit, what quantizing the gathered values gives: blocks lie within one token, and
the amax of a scale that spans all tokens is agreed on by the ranks first.

Codes of one byte travel as they meet the weight's GEMM: E4M3 or the gradient's own, under one scale of all
tokens, one of each token, in blocks of 1x128, or as rows that hold the scales of their blocks. Codes of four
bits do for activations; gradients travel as values, since they are rounded after a random transform of all
tokens. So do gradients that a weight's row scales multiply before they are quantized.
"""

import contextlib
import reprlib

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from qshard._runtime.classes import Process
from qshard._runtime.hooks import of_package
from qshard.formats import info_of

ops = torch.ops.qshard


def gather_rows(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(M, ...) of each rank to (ranks x M, ...)."""
    rows = rows.contiguous()
    gathered = rows.new_empty((group.size() * rows.shape[0], *rows.shape[1:]))
    dist.all_gather_into_tensor(gathered, rows, group=group)
    return gathered


def _travels_in_codes(format: str, is_gradient: bool) -> bool:
    if format == "" or is_gradient and info_of(format).gemm.folds_row_scales:
        return False
    return info_of(format).code_bits == 8


def _gather_codes(x, dim, format, is_gradient, group):
    """One all-gather of bytes; before it an all-reduce of one amax, if one scale spans all tokens."""
    x = x.contiguous()
    amax = ops._message_amax(x, format)
    if amax.numel():
        # As an integer, so that a NaN is the largest.
        dist.all_reduce(amax.view(torch.int32), op=dist.ReduceOp.MAX, group=group)
    message = ops._encode_activation(x, format, is_gradient, amax)
    messages = gather_rows(message, group)
    whole = ops._decode_activations(messages, format, is_gradient, x.shape, dim, x.dtype)
    if of_package.take_samples is not None:  # the linear finds no error in values that come of codes
        Process.pass_tally(message, whole)
    return whole


def _gather_quantized(rows, format, group):
    """rows (M, K) of each rank: the values (ranks x M, K) of a tensor whose shards they are."""
    m, k = rows.shape
    part = ops.quantize(
        rows, format, logical_rows=group.size() * m, row_offset=group.rank() * m
    )
    message = ops._pre_all_gather(part, group.group_name)
    gathered = ops._post_all_gather(part, gather_rows(message.flatten(), group), rows.dtype)
    return ops.dequantize(gathered, dtype=rows.dtype).view(group.size() * m, k)


@contextlib.contextmanager
def _names_the_operator():
    """Errors of torch and of the operators that make messages, which all ranks meet alike."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        raise type(error)(f"qshard::_gather_tokens: {error}") from error


def _check(x, dim, format, is_gradient, group):
    """The group, where the arguments of the operator go together."""
    in_codes = _travels_in_codes(format, is_gradient)
    if not 0 <= dim < x.dim() - in_codes:  # blocks of codes lie within one token
        raise ValueError(
            f"cannot put tensors of shape {tuple(x.shape)} together along {dim=}"
            + " in codes" * in_codes
        )
    return _group_of(group)


def _group_of(name):
    try:
        return distributed_c10d._resolve_process_group(name)
    except RuntimeError:  # its text has the whole name, however long
        raise ValueError(f"no process group has the name {reprlib.repr(name)}") from None


@torch.library.custom_op("qshard::_gather_tokens", mutates_args=())
def gather_tokens(x: torch.Tensor, dim: int, format: str, is_gradient: bool, group: str) -> torch.Tensor:
    """x (..., K), cut in equal parts along `dim`: the whole, in the dtype of x. format: of the weight that
    it meets, or "" to gather values. An operator, which compilers do not look into."""
    with _names_the_operator():
        _check(x, dim, format, is_gradient, group)
        return gather_tokens_now(x, dim, format, is_gradient, group)


@gather_tokens.register_fake
def _(x, dim, format, is_gradient, group):
    with _names_the_operator():
        return x.new_empty(_whole_shape(x, dim, _check(x, dim, format, is_gradient, group)))


def _whole_shape(x, dim, group):
    return [size * group.size() if i == dim else size for i, size in enumerate(x.shape)]


@torch.no_grad()
def gather_tokens_now(x, dim, format, is_gradient, group):
    group = distributed_c10d._resolve_process_group(group)
    whole = _whole_shape(x, dim, group)
    if x.numel() == 0:
        return x.new_empty(whole)
    if _travels_in_codes(format, is_gradient):
        return _gather_codes(x, dim, format, is_gradient, group)
    rows = x.reshape(-1, x.shape[-1])
    activations = info_of(format).activations if format else None
    if activations is None or activations.row_format is None or (
        is_gradient and activations.stochastic_gradients
    ):
        rows = gather_rows(rows, group)
    else:
        rows = _gather_quantized(rows, activations.row_format, group)
    if dim == 0:
        return rows.view(whole)
    return rows.view(group.size(), *x.shape).movedim(0, dim).reshape(whole)
