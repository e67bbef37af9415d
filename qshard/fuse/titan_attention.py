"""Attention of torchtitan 0.2, whose rotary embedding is a function of its file."""

import functools
from dataclasses import dataclass

import torch

from qshard.fuse.attention import file_of, is_own, reason_of_file
from qshard.fuse.part import Part
from qshard.nn.rotary import turn_pair

_FUNCTION = "apply_rotary_emb"


@dataclass(frozen=True)
class TitanAttention(Part):
    """The forward of torchtitan's attentions, written again: the same steps, but the rotary embedding
    of queries and keys, which are one pass each, in fp32 and rounded once.

    The file's function runs where tables and positions do not fit, and the plain forward for masks
    that it would refuse. In compiled code the pass stands for complex tables, for which Inductor has
    no code, and the plain forward for real ones.

    has_norms: queries and keys are normalized before. scale: the attribute that scales products of
        queries and keys, if there is one. masked: kinds of attention that are given a mask.
    is_optional: the module's use_rope says whether positions count. is_complex: what the table holds.
    """

    has_norms: bool = False
    scale: str | None = None
    masked: tuple[str, ...] = ("flex", "varlen")
    is_optional: bool = False
    is_complex: bool = True

    def describe(self, module):
        return "rotary embedding of queries and keys"

    def reason(self, module):
        return reason_of_file(module, _FUNCTION)

    def names(self, cls):
        return "x", "table", "masks", "positions"

    def forward(self, cls):
        plain, file, run = cls.forward, file_of(cls), self._attend
        is_complex = self.is_complex

        @functools.wraps(plain)
        def forward(self, *args, **kwargs):
            # As torchtitan's blocks call it; the plain forward takes, or refuses, other ways.
            is_usual = 3 <= len(args) <= 4 and kwargs.keys() <= {"positions"} and len(args) + len(kwargs) <= 4
            if not is_usual or not is_own(file.get(_FUNCTION), file):
                return plain(self, *args, **kwargs)
            if not is_complex and torch.compiler.is_compiling():
                return plain(self, *args, **kwargs)
            y = run(self, file[_FUNCTION], *args, **kwargs)
            return plain(self, *args, **kwargs) if y is None else y

        return forward

    def _attend(self, module, function, x, table, masks, positions=None):
        kind = module.attn_type
        if not (masks is None if kind == "sdpa" else masks is not None and kind in self.masked):
            return None
        heads = (*x.shape[:2], -1, module.head_dim)
        query, key, value = (w(x) for w in (module.wq, module.wk, module.wv))
        query, key, value = (t.view(heads) for t in (query, key, value))
        if self.has_norms:
            query = module.q_norm(query) if module.q_norm else query
            key = module.k_norm(key) if module.k_norm else key
        if not self.is_optional or module.use_rope:
            query, key = _turned(query, key, table, positions, function)
        given = (masks,) if kind == "varlen" else ()
        options = {} if kind == "varlen" else {"enable_gqa": module.enable_gqa}
        if kind == "flex":
            options["block_mask"] = masks
        if self.scale is not None:
            options["scale"] = getattr(module, self.scale)
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        output = module.inner_attention(query, key, value, *given, **options)
        if kind != "varlen":
            output = output.transpose(1, 2).contiguous()
        return module.wo(output.view(*x.shape[:2], -1))


def _turned(query, key, table, positions, function):
    if all(type(t) is torch.Tensor for t in (query, key, table)):
        # The function rounds real tables to the dtype of queries.
        rows = table if table.is_complex() else table.to(query.dtype)
        turned = turn_pair(query, key, rows, positions)
        if turned is not None:
            return turned
    return function(query, key, table, positions)
