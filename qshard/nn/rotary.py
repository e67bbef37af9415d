"""Rotary position embedding (arXiv:2104.09864)."""

import contextlib

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from qshard import ops
from qshard.nn.parts.arguments import check_choice

SHORT = (torch.bfloat16, torch.float16)
_ASKED = (Tensor.requires_grad.__get__, Tensor.dtype.__get__, torch.is_floating_point)


class RotaryAngles(Tensor):
    """Angles that `.to()` of 16 bits leaves as they are: FSDP2's MixedPrecisionPolicy, and FSDP1's, cast what
    a module is given, and in bfloat16 angles of positions below 4,096 are off by up to 8 rad."""

    def __deepcopy__(self, memo):
        return self.clone()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            # What FSDP2 asks of each argument of each module.
            if func in _ASKED:
                return func(*args)
            if func is Tensor.to and len(args) == 2 and not kwargs and type(args[1]) is torch.dtype:
                if args[1] in SHORT and args[0].dtype not in SHORT:
                    return args[0]
            return cls._call(func, args, kwargs or {})

    @classmethod
    def _call(cls, func, args, kwargs):
        # Modes that watch compiled graphs, which this may be an input of, take no subclass.
        is_watched = not torch.compiler.is_compiling() and _get_current_dispatch_mode() is not None
        with _disable_current_modes() if is_watched else contextlib.nullcontext():
            if func is Tensor.to and args[0].dtype not in SHORT:
                args, kwargs = _moved_only(*args, **kwargs)
            result = func(*args, **kwargs)
            stays = func in (Tensor.to, Tensor.cuda, Tensor.__getitem__, Tensor.clone)
            return result.as_subclass(cls) if stays and not isinstance(result, cls) else result


def _moved_only(angles, *args, **kwargs):
    """Arguments of Tensor.to, without a dtype of 16 bits."""
    asked = (*args, *kwargs.values())
    if not any(getattr(a, "dtype", a) in SHORT for a in asked):
        return (angles, *args), kwargs
    devices = [getattr(a, "device", a) for a in (*args[:1], kwargs.get("device"), kwargs.get("other"))]
    devices = [d for d in devices if isinstance(d, (str, int, torch.device))]
    return (angles, *(devices or [angles.device])[:1]), {}


class RotaryPositionEmbedding(nn.Module):
    """Angles that `MultiheadAttention` and `TransformerLayer` take as rotary_pos_emb. `.to()` of 16 bits, of
    FSDP2 and FSDP1 too, leaves them float32; no cast of the model changes the dtype of the frequencies.

    dim: channels of a head. rotary_percent: the part of them that is rotated, at most 1: the first
        int(dim * rotary_percent) channels, an even number.
    rotary_base: pair i of n rotated channels turns by rotary_base^(-2i/n) radians from one position to
        the next.
    seq_len_interpolation_factor, pretrained_max_position_embeddings: with both, positions are divided by
        the factor (arXiv:2306.15595), and where max_seq_len is more than factor * pretrained, by
        max_seq_len / pretrained. One without the other changes nothing.
    interleaved: neighbouring channels make a pair, instead of those half of the rotated channels apart;
        rotary_pos_interleaved of the attention says the same.
    """

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
        *,
        device=None,
    ):
        super().__init__()
        self.dim = int(dim * rotary_percent) if rotary_percent < 1 else dim
        self.rotary_base, self.interleaved = rotary_base, interleaved
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.register_buffer("inv_freq", self._frequencies(device))

    def _frequencies(self, device):
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim
        return 1.0 / self.rotary_base**exponents

    def _apply(self, fn, recurse=True):
        frequencies = self.inv_freq
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != frequencies.dtype:
            self.inv_freq = frequencies.to(self.inv_freq.device)
        return self

    def reset_parameters(self) -> None:
        """The frequencies, after the meta device."""
        self.inv_freq.copy_(self._frequencies(self.inv_freq.device))

    def forward(self, max_seq_len: int, offset: int = 0) -> RotaryAngles:
        """(max_seq_len, 1, 1, rotated channels) angles in radians, float32, of positions offset, offset + 1,
        ...: both channels of a pair have its angle. `.to()` moves them, and does not cast to 16 bits."""
        positions = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=torch.float32)
        positions = positions + offset
        factor = self.seq_len_interpolation_factor
        pretrained = self.pretrained_max_position_embeddings
        if factor is not None and pretrained is not None:
            longer = max_seq_len > pretrained * factor
            positions = positions * (1 / (max_seq_len / pretrained) if longer else 1 / factor)
        angles = positions[:, None] * self.inv_freq.float()
        if self.interleaved:
            angles = angles.repeat_interleave(2, -1)
        else:
            angles = torch.cat([angles, angles], -1)
        return angles[:, None, None, :].as_subclass(RotaryAngles)


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, tensor_format: str = "sbhd", interleaved: bool = False
) -> Tensor:
    """Rotates the first channels of each head, computed in fp32 and rounded once.

    t: (s, b, h, d) of "sbhd" or (b, s, h, d) of "bshd". freqs: (s or more, 1, 1, rotated channels), not in
        16 bits."""
    check_choice("apply_rotary_pos_emb", "tensor_format", tensor_format, ("sbhd", "bshd"))
    dim = 0 if tensor_format == "sbhd" else 1
    return rotate(t, *tables_of(t, freqs, dim), dim, interleaved)


def tables_of(t: Tensor, freqs: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """(cos, sin) of apply_rotary_pos_emb's angles, float32 (positions, rotated channels)."""
    length = t.shape[dim]
    if freqs.dim() != 4 or freqs.shape[0] < length or freqs.shape[-1] > t.shape[-1]:
        raise ValueError(
            f"qshard.nn: rotary_pos_emb of shape {tuple(freqs.shape)} does not fit {length} positions "
            f"and {t.shape[-1]} channels; it is (positions, 1, 1, rotated channels)"
        )
    if freqs.dtype in SHORT:
        raise TypeError(
            f"qshard.nn: rotary_pos_emb in {freqs.dtype}: angles are rounded by several radians. Give those of "
            "qshard.nn.RotaryPositionEmbedding, or float32 under MixedPrecisionPolicy(cast_forward_inputs="
            "False), or compute them within the module that FSDP casts for"
        )
    with torch._C.DisableTorchFunctionSubclass():  # a plain tensor from here on
        freqs = freqs[:length, 0, 0].float()
    return freqs.cos(), freqs.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, dim: int, interleaved: bool = False) -> Tensor:
    """`qshard.ops.rotary_embedding`, or the same by torch's operators, in code compiled for CPUs and for
    subclasses and dtypes that the operator does not take.

    x: (..., positions, ..., channels) of four dimensions, positions in `dim`. cos, sin: float32 (positions or
        more, rotated channels), or one such table for each sequence, in dimension 0."""
    if _takes_operator(x, cos, sin):
        return ops.rotary_embedding(x, cos.contiguous(), sin.contiguous(), dim, interleaved=interleaved)
    cos, sin = (_beside(table[..., : x.shape[dim], :], dim) for table in (cos, sin))
    rotated, kept = x[..., : cos.shape[-1]].float(), x[..., cos.shape[-1] :]
    turned = rotated * cos + _quarter_turn(rotated, interleaved) * sin
    return torch.cat([turned.to(x.dtype), kept], -1)


def split_heads(x: Tensor, heads: list[int]) -> list[Tensor]:
    """Queries, keys and values (., ., heads, channels), views of x (., ., groups * sum(heads), channels). heads:
    how many of each a group has, which lie one after the other."""
    groups = x.unflatten(2, (-1, sum(heads)))
    return [part.flatten(2, 3) for part in groups.split(heads, 3)]


def split_and_rotate(
    x: Tensor, cos: Tensor, sin: Tensor, heads: list[int], dim: int, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """split_heads(x, heads), queries and keys rotated; in training all three tensors of their own, whose
    gradients come back into one as they are rotated."""
    trains = torch.is_grad_enabled() and x.requires_grad
    if trains and _takes_operator(x, cos, sin):
        return ops.split_rotary_embedding(
            x, cos.contiguous(), sin.contiguous(), heads, dim, interleaved=interleaved
        )
    query, key, value = split_heads(x, heads)
    query, key = (rotate(part, cos, sin, dim, interleaved) for part in (query, key))
    # Attention keeps it for backward, and a view would keep the whole projection.
    return query, key, value.contiguous() if trains else value


def _takes_operator(x, cos, sin):
    # Inductor computes cosines again for each head: of a step of eight Llama-8B layers 2.7 ms for 1.0 on an H100.
    if torch.compiler.is_compiling():
        if not x.is_cuda:
            return False
    elif torch._C._are_functorch_transforms_active():
        return False
    return (
        all(type(t) is Tensor for t in (x, cos, sin))
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and not (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))
    )


def _beside(table, dim):
    """A table of angles with the dimensions of what it turns."""
    if table.dim() == 2:
        return table.view([1] * dim + [len(table)] + [1] * (2 - dim) + [table.shape[-1]])
    if dim == 0:
        return table.transpose(0, 1).unsqueeze(2)
    return table.unsqueeze(3 - dim)


def _quarter_turn(x, interleaved):
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


# ---------------------------------------------------------------- tables that models keep of all positions


def apply_rotary_emb(
    xq: Tensor, xk: Tensor, freqs_cis: Tensor, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The function of this name in Meta's Llama and torchtitan, in one pass over queries and one over keys,
    computed in fp32 and rounded once.

    xq, xk: float32, bfloat16 or float16 (batch, positions, heads, channels). Neighbouring channels are a pair.
    freqs_cis: complex64 (positions or more, channels / 2), exp(i * angle) of each position and pair.
    positions: rows of freqs_cis, (1 or batch, positions) integers; None: the first ones, in order.

    Returns xq and xk turned, in their dtypes. ValueError where shapes or dtypes do not fit."""
    is_complex = isinstance(freqs_cis, Tensor) and freqs_cis.is_complex()
    turned = turn_pair(xq, xk, freqs_cis, positions) if is_complex else None
    if turned is None:
        raise ValueError(
            "qshard.nn.apply_rotary_emb: takes queries and keys (batch, positions, heads, channels) of one dtype of "
            "at most 32 bits, complex64 freqs_cis (positions or more, channels / 2) and positions (1 or batch, "
            f"positions); got {_shown(xq)}, {_shown(xk)}, {_shown(freqs_cis)} and {_shown(positions)}"
        )
    return turned


def turn_pair(query, key, table, positions=None):
    """(query, key) (batch, positions, heads, channels) turned by rows of a table, None where they do not fit.

    table: complex64 (positions or more, channels / 2), whose pairs are neighbours; or of real numbers (positions
        or more, 2 * channels), cosines beside sines, whose pairs are half of the channels apart."""
    tensors = (query, key, table)
    if not all(isinstance(t, Tensor) for t in tensors) or not _go_together(query, key):
        return None
    is_complex = table.is_complex()
    if is_complex and table.dtype != torch.complex64:
        return None
    rows = _rows_of(table, query, query.shape[-1] // 2 if is_complex else 2 * query.shape[-1], positions)
    if rows is None:
        return None
    halves = _cos_sin_of_pairs(rows) if is_complex else rows.float().chunk(2, -1)
    cos, sin = (half.contiguous() for half in halves)  # once for both
    return tuple(rotate(x, cos, sin, 1, is_complex) for x in (query, key))


def _go_together(query, key):
    return (
        query.dim() == key.dim() == 4
        and query.shape[:2] == key.shape[:2]
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] % 2 == 0
        and query.dtype == key.dtype
        and query.dtype in (torch.float32, torch.bfloat16, torch.float16)
    )


def _rows_of(table, x, width, positions):
    """A table's rows for x (batch, positions, ., .): (positions, width), or of each sequence (batch, positions,
    width); None where they do not fit."""
    batch, length = x.shape[:2]
    if table.dim() != 2 or table.shape[1] != width:
        return None
    if positions is None:
        return table[:length] if len(table) >= length else None
    if not isinstance(positions, Tensor) or positions.shape not in ((1, length), (batch, length)):
        return None
    return table[positions[0] if len(positions) == 1 else positions]


def _cos_sin_of_pairs(freqs):
    """cosines and sines for both channels of each pair."""
    parts = torch.view_as_real(freqs)
    pairs = (*parts.shape[:-1], 2)
    return tuple(part.expand(pairs).flatten(-2) for part in parts.split(1, -1))


def _shown(value):
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
