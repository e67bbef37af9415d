"""Attention of transformers, whose rotary embedding is a function of its file."""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn as torch_nn

from qshard.fuse.part import Part, Reason
from qshard.nn.parts.known_activations import has_more
from qshard.nn.rotary import rotate

_FUNCTION = "apply_rotary_pos_emb"
_READ = (_FUNCTION, "eager_attention_forward", "ALL_ATTENTION_FUNCTIONS")  # of the file


@dataclass(frozen=True)
class Attention(Part):
    """The forward of transformers' attentions, written again: the same steps, but the rotary
    embedding of queries and keys, which are one pass each, in fp32 and rounded once. A subclass's
    own forward and not another function in the class's file: that function is one for all models
    of a process, and with the package `kernels` it is one module, whose forward is replaced for
    all of them.

    The plain forward runs in compiled code, which fuses the function, and where the arguments are
    others than a decoder layer gives. The function itself runs where cos and sin have another dtype
    than queries and keys.

    project: (module, x) -> query, key, value of (batch, heads, positions, channels).
    options: what the file gives the attention function besides. output: the last linear.
    cache: the parameter that takes the cache, which transformers 5.24 renamed.
    """

    project: Callable
    options: Callable
    output: str = "o_proj"
    cache: str = "past_key_values"

    def describe(self, module):
        return "rotary embedding of queries and keys"

    def reason(self, module):
        return reason_of_file(module, *_READ)

    def names(self, cls):
        return "hidden_states", "position_embeddings", "attention_mask", self.cache

    def forward(self, cls):
        plain, file, names = cls.forward, file_of(cls), self.names(cls)

        @functools.wraps(plain)
        def forward(self, *args, **kwargs):
            if torch.compiler.is_compiling() or not is_own(file.get(_FUNCTION), file):
                return plain(self, *args, **kwargs)
            given = dict(zip(names, args))
            others = {k: v for k, v in kwargs.items() if k not in names}
            given.update((k, v) for k, v in kwargs.items() if k in names and k not in given)
            is_usual = len(given) + len(others) == len(args) + len(kwargs)
            # The cache's old name is for the plain forward to translate.
            is_usual = is_usual and names[:3] == tuple(n for n in names[:3] if n in given)
            if not is_usual or "past_key_values" in others or given["position_embeddings"] is None:
                return plain(self, *args, **kwargs)
            return attend(self, file, others, *(given.get(name) for name in names))

        attend = self._attend
        return forward

    def _attend(self, module, file, kwargs, x, position_embeddings, mask, cache):
        shape = x.shape[:-1]
        query, key, value = self.project(module, x)
        query, key = _rotated(query, key, *position_embeddings, file[_FUNCTION])
        if cache is not None:
            more = {} if self.cache == "past_key_values" else {"kwargs": kwargs}
            key, value = cache.update(key, value, module.layer_idx, **more)
        attend = file["ALL_ATTENTION_FUNCTIONS"].get_interface(
            module.config._attn_implementation, file["eager_attention_forward"]
        )
        output, weights = attend(
            module,
            query,
            key,
            value,
            mask,
            dropout=module.attention_dropout if module.training else 0.0,
            scaling=module.scaling,
            **self.options(module),
            **kwargs,
        )
        output = output.reshape(*shape, -1).contiguous()
        return getattr(module, self.output)(output), weights


def reason_of_file(module, function, *others):
    """Why a module is left whose forward calls a function of its file, and reads other names there."""
    file = file_of(type(module))
    missing = [name for name in (function, *others) if name not in file]
    if missing:
        return Reason(f"its file has no {', '.join(missing)}", warns=True)
    if not is_own(file[function], file):
        return Reason(f"{function} of its file is not the one that the file defines", warns=True)
    return None


def file_of(cls):
    return vars(sys.modules[cls.__module__])


def is_own(function, file):
    """Whether a file's function is the one that the file defines, by the globals that it reads.
    With the package `kernels` it is a module that holds this function, and whose forward others
    may replace."""
    if not isinstance(function, torch_nn.Module):
        return getattr(function, "__globals__", None) is file
    if has_more(function):
        return False
    cells = (cell.cell_contents for cell in type(function).forward.__closure__ or ())
    return any(getattr(held, "__globals__", None) is file for held in cells)


def _rotated(query, key, cos, sin, function):
    """(query, key) of (batch, heads, positions, channels), of which cos and sin turn the first."""
    tensors = (query, key, cos, sin)
    channels = cos.shape[-1]
    fits = all(type(t) is torch.Tensor for t in tensors) and query.dim() == key.dim() == 4
    fits = fits and cos.dim() == 3 and len(cos) in (1, len(query))
    fits = fits and cos.shape == sin.shape and cos.shape[1] == query.shape[2]
    fits = fits and query.shape[2:] == key.shape[2:] and query.dtype == key.dtype
    if fits and {torch.promote_types(query.dtype, t.dtype) for t in tensors} == {query.dtype}:
        cos, sin = ((t[0] if len(t) == 1 else t).float() for t in (cos, sin))
        return rotate(query, cos, sin, 2), rotate(key, cos, sin, 2)
    if channels == query.shape[-1]:
        return function(query, key, cos, sin)
    turned = function(query[..., :channels], key[..., :channels], cos, sin)
    return tuple(torch.cat([t, x[..., channels:]], -1) for t, x in zip(turned, (query, key)))


# ---------------------------------------------------------------------------- what files differ in


def three_linears(module, x):
    """As Llama, Mistral, Qwen2, Gemma and Gemma 2 project."""
    shape = (*x.shape[:-1], -1, module.head_dim)
    linears = (module.q_proj, module.k_proj, module.v_proj)
    return tuple(linear(x).view(shape).transpose(1, 2) for linear in linears)


def norms_of_heads(module, x):
    """As Qwen3 projects: queries and keys are normalized as they come out of the linears."""
    shape = (*x.shape[:-1], -1, module.head_dim)
    query = module.q_norm(module.q_proj(x).view(shape)).transpose(1, 2)
    key = module.k_norm(module.k_proj(x).view(shape)).transpose(1, 2)
    return query, key, module.v_proj(x).view(shape).transpose(1, 2)


def norms_of_transposed_heads(module, x):
    """As Gemma 3 projects: they are normalized once transposed."""
    query, key, value = three_linears(module, x)
    return module.q_norm(query), module.k_norm(key), value


def optional_norms(module, x):
    """As Phi projects."""
    query, key, value = three_linears(module, x)
    if module.qk_layernorm:
        query, key = module.q_layernorm(query), module.k_layernorm(key)
    return query, key, value


def one_linear(module, x):
    """As Phi-3 projects."""
    shape = (*x.shape[:-1], -1, module.head_dim)
    projected = module.qkv_proj(x)
    queries = module.config.num_attention_heads * module.head_dim
    keys = queries + module.num_key_value_heads * module.head_dim
    parts = (projected[..., :queries], projected[..., queries:keys], projected[..., keys:])
    return tuple(part.view(shape).transpose(1, 2) for part in parts)


def nothing(module):
    return {}


def window(module):
    return {"sliding_window": module.sliding_window}


def window_of_config(module):
    return {"sliding_window": getattr(module.config, "sliding_window", None)}


def window_and_cap(module):
    return {"sliding_window": module.sliding_window, "softcap": module.attn_logit_softcapping}
