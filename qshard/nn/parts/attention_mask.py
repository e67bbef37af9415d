"""Which keys a query attends to, by the names of TransformerEngine's masks."""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

MASK_TYPES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)


def mask_type_of(name: str) -> str:
    """One of MASK_TYPES; "padding,causal" and "causal,padding" are "padding_causal"."""
    name = name.replace(",", "_")
    name = "padding_causal" if name == "causal_padding" else name
    if name not in MASK_TYPES:
        raise ValueError(
            f"qshard.nn: attn_mask_type={name!r} is none of {', '.join(map(repr, MASK_TYPES))}"
        )
    return name


def window_of(mask_type: str, window_size: tuple[int, int] | None) -> tuple[int, int]:
    """(left, right) keys around the diagonal, -1 for all; a causal mask has 0 to the right."""
    left, right = (-1, -1) if window_size is None else window_size
    expected = "(-1, 0) or (>=0, 0)" if "causal" in mask_type else "(-1, -1) or (>=0, >=0)"
    if "causal" in mask_type:
        is_given = window_size is None or (left, right) == (-1, 0) or (left >= 0 and right == 0)
        can_be = (left, right) == (-1, -1) or left >= 0
        window = (left, 0)
    else:
        is_given = (left, right) == (-1, -1) or (left >= 0 and right >= 0)
        can_be = (left, right) == (-1, 0)
        window = (left, right) if is_given else (-1, -1)
    if not is_given:
        text = f"qshard.nn: window_size={window_size} with {mask_type!r} should be {expected}"
        if not can_be:
            raise ValueError(text)
        warnings.warn(f"{text}; {window} is used", stacklevel=3)
    return window


def is_bottom_right(mask_type: str, bottom_right_diagonal: bool | None) -> bool:
    """Whether the diagonal ends in the last query and key: what the mask's name says, else what was
    asked for, else yes."""
    if mask_type in ("causal", "padding_causal"):
        return False
    if "bottom_right" in mask_type or bottom_right_diagonal is None:
        return True
    return bottom_right_diagonal


@dataclass(frozen=True)
class Mask:
    """allowed: bool, broadcastable to (batch, heads, queries, keys), or None for all.
    is_causal: allowed is what torch's is_causal says, and None.
    dead: queries without a key, (..., queries, 1), which get zeros, or None. All keys are `allowed`
        to them: a softmax over nothing has no value."""

    allowed: Tensor | None = None
    is_causal: bool = False
    dead: Tensor | None = None


def positions(queries: int, keys: int, device) -> Tensor:
    """(1, 1, queries, keys): the index of the query minus that of the key."""
    rows = torch.arange(queries, device=device).view(1, 1, -1, 1)
    return rows - torch.arange(keys, device=device).view(1, 1, 1, -1)


def padding_masks(attention_mask, cu_seqlens, lengths, batch: int, is_cross: bool):
    """(batch, 1, 1, length) of queries and keys, True where there is padding.

    attention_mask: one of these for both, or two for cross attention; None: from cu_seqlens, the
        cumulative lengths (batch + 1) of queries and keys."""
    if attention_mask is None:
        if cu_seqlens[0] is None or (is_cross and cu_seqlens[1] is None):
            raise ValueError(
                "qshard.nn: a padding mask needs attention_mask, or cu_seqlens_q and, for cross "
                "attention, cu_seqlens_kv"
            )
        sums = cu_seqlens if is_cross else (cu_seqlens[0],) * 2
        return [_beyond(sum, length, batch) for sum, length in zip(sums, lengths)]
    masks = attention_mask if isinstance(attention_mask, (tuple, list)) else (attention_mask,)
    if len(masks) != (2 if is_cross else 1):
        raise ValueError(
            "qshard.nn: attention_mask of a padding mask is a tensor for self attention and a tuple "
            f"of two for cross attention; got {len(masks)}"
        )
    masks = (masks[0], masks[-1])
    for mask, length in zip(masks, lengths):
        if mask.dtype != torch.bool or tuple(mask.shape) != (batch, 1, 1, length):
            raise ValueError(
                f"qshard.nn: attention_mask of a padding mask is bool {(batch, 1, 1, length)}, True "
                f"where there is padding; got {mask.dtype} {tuple(mask.shape)}"
            )
    return masks


def _beyond(cu_seqlens, length, batch):
    lengths = cu_seqlens[1 : batch + 1] - cu_seqlens[:batch]
    at = torch.arange(length, device=cu_seqlens.device)
    return (at >= lengths.view(-1, 1)).view(batch, 1, 1, length)


def offset_of(paddings, queries: int, keys: int):
    """By how much a diagonal that ends at the bottom right is shifted: an int, or (batch, 1, 1, 1)."""
    if paddings is None:
        return keys - queries
    query_padding, key_padding = paddings
    present = (~key_padding).sum(-1) - (~query_padding).sum(-1)
    return present.view(-1, 1, 1, 1)


def make_mask(
    mask_type: str,
    attention_mask,
    paddings,
    window: tuple[int, int],
    bottom_right: bool,
    queries: int,
    keys: int,
    device,
) -> Mask:
    """paddings: what padding_masks gives, for padding masks. attention_mask: of "arbitrary", bool,
    True for what is left out."""
    left, right = window
    needs_diagonal = left >= 0 or right >= 0
    if mask_type != "arbitrary" and paddings is None:
        if not needs_diagonal:
            return Mask()
        square = queries == keys
        if left < 0 and right == 0 and "causal" in mask_type and (not bottom_right or square):
            return Mask(is_causal=True)
    excluded = []
    if mask_type == "arbitrary":
        if not isinstance(attention_mask, Tensor) or attention_mask.dtype != torch.bool:
            raise ValueError(
                "qshard.nn: attn_mask_type='arbitrary' needs a bool attention_mask that broadcasts to "
                "(batch, heads, queries, keys), True for what is left out"
            )
        excluded.append(attention_mask)
    if needs_diagonal:
        distance = positions(queries, keys, device)
        if bottom_right:
            distance = distance + offset_of(paddings, queries, keys)
        if left >= 0:
            excluded.append(distance > left)
        if right >= 0:
            excluded.append(distance < -right)
    if paddings is not None:
        excluded += [paddings[0].transpose(-1, -2), paddings[1]]
    total = excluded[0]
    for mask in excluded[1:]:
        total = total | mask
    dead = total.all(-1, keepdim=True)
    return Mask(~total | dead, dead=dead)
