"""Selective activation checkpointing with quantized linears.

torch.utils.checkpoint with a policy keeps the outputs of some operators, and computes the others again in backward.
Below autograd a linear of qshard's is an operator of its own, whatever module or function called it, and policies
that were written for `aten.mm` do not know it.
"""

from collections.abc import Callable, Iterable

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_ops, _aten = torch.ops.qshard, torch.ops.aten

# What multiplies matrices in qshard's linears, norm-linears, MLPs and experts. Their backward reads what they return
# (codes of the input, statistics, maxima), which is kept with the output.
PRODUCTS = frozenset(
    {
        _ops.linear_forward.default,
        _ops._norm_linear_forward.default,
        _ops.swiglu_linear_forward.default,
    }
)
# Compiled code makes an input's codes apart from its linears, and keeps those that backward reads.
_CODES = frozenset({_ops.quantize_input.default})


def _found(*names: str) -> frozenset:
    """Those of these operators below `torch` that this version of torch, or a package that was imported, has."""
    found = set()
    for name in names:
        thing = torch
        for part in name.split("."):
            thing = getattr(thing, part, None)
            if thing is None:
                break
        else:
            found.add(thing)
    return frozenset(found)


_MATMULS = PRODUCTS | _found(
    "ops.aten.mm.default",
    "ops.aten.addmm.default",
    "ops.aten.linear.default",
    "ops.aten._scaled_mm.default",
    "ops.aten._scaled_mm_v2.default",
    "ops.aten._grouped_mm.default",
    "ops.aten._scaled_grouped_mm.default",
    "ops.aten._scaled_grouped_mm_v2.default",
)


def _others() -> frozenset:
    """What torchtitan saves beside products (torchtitan/distributed/activation_checkpoint.py), and convolutions, which
    torch's partitioner counts among what is expensive (torch/_functorch/partitioners.py: get_default_op_list)."""
    return _found(
        "ops.aten.convolution.default",
        "ops.aten._scaled_dot_product_flash_attention.default",
        "ops.aten._scaled_dot_product_flash_attention_for_cpu.default",
        "ops.aten._scaled_dot_product_efficient_attention.default",
        "ops.aten._scaled_dot_product_cudnn_attention.default",
        "ops.aten._scaled_dot_product_attention_math.default",
        "ops.aten._scaled_dot_product_fused_attention_overrideable.default",
        "ops.aten._flash_attention_forward.default",
        "ops.aten._efficient_attention_forward.default",
        "ops.higher_order.flex_attention",
        "ops.torch_attn._varlen_attn.default",
        # It may break ties in another way the second time, and send tokens to other experts.
        "ops.aten.topk.default",
        # A compiled region that torch was told to wrap, as torchtitan wraps flex_attention.
        "ops.higher_order.inductor_compiled_code",
        "ops._c10d_functional.reduce_scatter_tensor.default",
        "ops._c10d_functional.reduce_scatter_tensor_coalesced.default",
        "ops._c10d_functional.all_reduce.default",
        "ops._c10d_functional.all_to_all_single.default",
        "ops.qshard._sum_and_scatter_tokens.default",
        "ops.deepep.dispatch.default",
        "ops.deepep.combine.default",
        "ops.hybridep.dispatch.default",
        "ops.hybridep.combine.default",
    )


def selective_policy(*, save: Iterable = (), recompute: Iterable = ()) -> Callable:
    """A policy for `torch.utils.checkpoint.create_selective_checkpoint_contexts`: it saves what is expensive to compute
    again, and has all else computed again in backward.

    >>> contexts = functools.partial(create_selective_checkpoint_contexts, qshard.selective_policy())
    >>> y = checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    Saved are the outputs of:

    - qshard's linears, norm-linears, SwiGLU MLPs and experts, and whatever their backward reads;
    - torch's products (mm, addmm, linear, _scaled_mm, _grouped_mm, _scaled_grouped_mm) and convolutions. bmm is not
      among them: attention that is written out would keep its scores;
    - attention: scaled_dot_product_attention, flex_attention, varlen_attn;
    - functional collectives that bring sums or tokens (reduce_scatter_tensor, all_reduce, all_to_all_single). An
      all-gather is made again, as its result is larger than what it was made from;
    - topk, and copies from the device to the host, which backward would wait for.

    save, recompute: operators that are saved, or computed again, too; overloads (`torch.ops.aten.bmm.default`) and
        higher-order operators. What stands in both is computed again.

    Gradients have the bits of a run without checkpointing, in every format. The policy keeps no state, so regions may
    share it. Raises TypeError for what is no operator.

    Sources: torch/utils/checkpoint.py; torchtitan's distributed/activation_checkpoint.py has the same list for mm.
    """
    return _policy(_saved("selective_policy", tuple(save), tuple(recompute)))


def selective_context_fn(
    *, every_second_matmul: bool = False, save: Iterable = (), recompute: Iterable = ()
) -> Callable:
    """What `torch.utils.checkpoint.checkpoint` and `checkpoint_wrapper` take as `context_fn`, with `selective_policy`.

    >>> y = checkpoint(block, x, use_reentrant=False, context_fn=qshard.selective_context_fn())

    every_second_matmul: save the first product of a region, the third and so on, and compute the others again, as
        torchtitan does with mm: half of the memory, and half of the time that saving all gains. Products of qshard and
        of torch are counted together; attention and collectives are saved all the same. The count begins anew in each
        region, which a policy alone cannot know: so this is no option of `selective_policy`.
    save, recompute: as of `selective_policy`. What is in `save` is saved whatever its number is.

    Raises TypeError for what is no operator.
    """
    save = tuple(save)
    saved = _saved("selective_context_fn", save, tuple(recompute))
    counted = (_MATMULS & saved) - frozenset(save) if every_second_matmul else frozenset()

    def context_fn():
        return create_selective_checkpoint_contexts(_policy(saved, counted))

    return context_fn


def _policy(saved, counted=frozenset()):
    """Every second one of `counted` is computed again. They are counted in this policy's regions together."""
    count = {False: 0, True: 0}  # in forward, and in recomputation, which may stop early

    def policy(ctx, op, *args, **kwargs):
        is_saved = op in saved or _leaves_the_device(op, args, kwargs)
        if op in counted:
            count[ctx.is_recompute] += 1
            is_saved = count[ctx.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _saved(caller, save, recompute):
    for name, operators in (("save", save), ("recompute", recompute)):
        for operator in operators:
            if not isinstance(operator, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
                is_packet = isinstance(operator, torch._ops.OpOverloadPacket)
                example = f"torch.ops.{operator}.default" if is_packet else "torch.ops.aten.bmm.default"
                raise TypeError(
                    f"qshard.{caller}: {name} takes overloads of operators, as {example}, not {operator!r}"
                )
    return (_MATMULS | _CODES | _others() | frozenset(save)) - frozenset(recompute)


def _leaves_the_device(op, args, kwargs) -> bool:
    """Whether it copies from a GPU to the host: an expert's number of tokens, for the sizes of an all-to-all."""
    return (
        op is _aten._to_copy.default
        and args[0].device.type == "cuda"
        and kwargs.get("device") is not None
        and torch.device(kwargs["device"]).type == "cpu"
    )
