"""Blocks that do more than their class's forward: a hook of any kind, a forward of a subclass, an object or a
patch. What calls them then calls them as TransformerEngine's are called, and adds their output itself."""

import contextlib
import types

import pytest
import torch
from nn_helpers import RECIPES, assert_bits, gradients, on_devices, randomize
from torch.nn.modules import module as torch_module

import qshard
from qshard import nn
from qshard.modules.calls import does_forward_alone
from qshard.nn.swiglu import swiglu_of_linears

HIDDEN = 64


def halved(values):
    """What the first tensor has."""
    if isinstance(values, torch.Tensor):
        return values * 0.5
    return (halved(values[0]), *values[1:])


def doubled(grads):
    return tuple(None if grad is None else grad * 2 for grad in grads)


def halves_output(cls):
    """A forward with TransformerEngine's arguments alone."""
    forward = cls.forward
    if issubclass(cls, nn.MultiheadAttention):
        return lambda self, x, attention_mask=None, **more: halved(forward(self, x, attention_mask, **more))
    return lambda self, x, is_first_microbatch=None: halved(forward(self, x, is_first_microbatch))


@contextlib.contextmanager
def patched(cls):
    forward = cls.forward
    cls.forward = halves_output(cls)
    try:
        yield
    finally:
        cls.forward = forward


def set_class(module, **members):
    module.__class__ = type(f"My{type(module).__name__}", (type(module),), members)


def only_of(module, change):
    """A global hook that changes what it is given of one module."""
    return lambda called, values, *more: change(more[-1] if more else values) if called is module else None


def called_by_subclass(module):
    cls = type(module)
    set_class(module, __call__=lambda self, *args, **kwargs: halved(cls.__call__(self, *args, **kwargs)))


KINDS = {
    "pre-hook": lambda m: m.register_forward_pre_hook(lambda _, args: halved(args)),
    "pre-hook with kwargs": lambda m: m.register_forward_pre_hook(
        lambda _, args, kwargs: (halved(args), kwargs), with_kwargs=True),
    "hook": lambda m: m.register_forward_hook(lambda _, args, output: halved(output)),
    "backward hook": lambda m: m.register_full_backward_hook(lambda _, inputs, outputs: doubled(inputs)),
    "backward pre-hook": lambda m: m.register_full_backward_pre_hook(lambda _, outputs: doubled(outputs)),
    "global pre-hook": lambda m: torch_module.register_module_forward_pre_hook(only_of(m, halved)),
    "global hook": lambda m: torch_module.register_module_forward_hook(only_of(m, halved)),
    "global backward hook": lambda m: torch_module.register_module_full_backward_hook(
        lambda called, inputs, outputs: doubled(inputs) if called is m else None),
    "global backward pre-hook": lambda m: torch_module.register_module_full_backward_pre_hook(
        only_of(m, doubled)),
    "forward of a subclass": lambda m: set_class(m, forward=halves_output(type(m))),
    "call of a subclass": called_by_subclass,
    "forward of the object": lambda m: setattr(
        m, "forward", types.MethodType(halves_output(type(m)), m)),
    "patched class": lambda m: patched(type(m)),
}


@contextlib.contextmanager
def doing_more(module, kind):
    with contextlib.ExitStack() as stack:
        made = KINDS[kind](module)
        if isinstance(made, torch.utils.hooks.RemovableHandle):
            stack.callback(made.remove)
        elif made is not None:
            stack.enter_context(made)
        yield


def layer(device="cpu", recipe="float8_blockwise", **options):
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "bias": False, "num_gqa_groups": 2,
               "attn_input_format": "bshd", "normalization": "RMSNorm", "activation": "swiglu", **options}
    module = randomize(nn.TransformerLayer(HIDDEN, 128, 4, device=device, **options))
    return qshard.quantize_(module, RECIPES[recipe], filter_fn=lambda *_: True)


def by_definition(module, x, encoder=None):
    """x + each block's output, as hooks leave it."""
    x = x + module.self_attention(x)[0]
    if encoder is not None:
        x = x + module.inter_attention(x, encoder_output=encoder)[0]
    return x + module.layernorm_mlp(x)[0]


def step(module, function, x):
    x = x.detach().requires_grad_()
    module.zero_grad()
    y = function(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, gradients(module)]


@on_devices
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", ["self_attention", "inter_attention", "layernorm_mlp"])
def test_a_layer_adds_the_output_of_a_block_that_does_more(part, kind, device):
    module = layer(device, layer_type="decoder")
    encoder = torch.randn(2, 8, HIDDEN, device=device)
    x = torch.randn(2, 8, HIDDEN, device=device)
    assert does_forward_alone(module.get_submodule(part))
    with doing_more(module.get_submodule(part), kind):
        assert not does_forward_alone(module.get_submodule(part))
        actual = step(module, lambda x: module(x, encoder_output=encoder), x)
        expected = step(module, lambda x: by_definition(module, x, encoder), x)
    assert_bits(actual, expected)


@on_devices
@pytest.mark.parametrize("fused", [False, True], ids=["three weights", "one weight"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", ["layernorm_qkv", "proj"])
def test_a_residual_is_the_layers_input_whatever_a_projection_does(part, kind, fused, device):
    module = layer(device, fuse_qkv_params=fused)
    x = torch.randn(2, 8, HIDDEN, device=device)
    with doing_more(module.self_attention.get_submodule(part), kind):
        actual = step(module, module, x)
        expected = step(module, lambda x: by_definition(module, x), x)
        added = module.self_attention(x, adds_input=True)
        assert_bits(added, x + module.self_attention(x)[0])
    assert_bits(actual, expected)


@pytest.mark.parametrize("fused", [False, True], ids=["three weights", "one weight"])
@pytest.mark.parametrize("options", [
    {"input_layernorm": True}, {}, {"attention_type": "cross", "input_layernorm": True}, {"attention_type": "cross"},
    {"input_layernorm": True, "return_layernorm_output": True}, {"qkv_weight_interleaved": False},
], ids=str)
def test_projections_with_hooks_give_the_same(options, fused):
    """Hooks see one tensor, as of TransformerEngine, and the module's input is no result."""
    module = randomize(nn.MultiheadAttention(HIDDEN, 4, num_gqa_groups=2, qkv_format="bshd",
                                             attention_dropout=0.0, fuse_qkv_params=fused, **options))
    x = torch.randn(2, 8, HIDDEN)
    more = {"encoder_output": torch.randn(2, 6, HIDDEN)} if "attention_type" in options else {}
    expected = module(x, **more)
    seen = []
    for name, part in module.named_children():
        if name != "core_attention":
            part.register_forward_hook(lambda module, args, output: seen.append(output))
    assert_bits(module(x, **more), expected)
    for output in seen:
        results = output if isinstance(output, tuple) else (output,)
        assert len(results) == 1 + (options.get("return_layernorm_output", False) and output is seen[0])
        assert all(type(result) is torch.Tensor and result is not x for result in results)


@pytest.mark.parametrize("part", ["self_attention", "layernorm_mlp"])
def test_a_stream_has_one_dtype_in_training_and_evaluation(part):
    """A block that runs in bfloat16 is added to a stream of float32."""
    module = layer(hidden_dropout=0.1)
    block = module.get_submodule(part)
    block.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(), *args[1:]))
    x = torch.randn(2, 8, HIDDEN)
    assert module.train()(x).dtype == module.eval()(x).dtype == torch.float32


class Adapter(torch.nn.Module):
    """Around a linear, as adapters of other libraries."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x, *args, **kwargs):
        return self.base(x, *args, **kwargs)


@pytest.mark.parametrize("part", ["self_attention.layernorm_qkv", "self_attention.proj",
                                  "self_attention", "layernorm_mlp"])
def test_adapters_around_parts(part):
    module = layer()
    x = torch.randn(2, 8, HIDDEN)
    expected = step(module, module, x)
    module.set_submodule(part, Adapter(module.get_submodule(part)))
    y, x_grad, _ = step(module, module, x)
    assert_bits([y, x_grad], expected[:2])


@pytest.mark.parametrize("part", ["self_attention.proj", "layernorm_mlp"])
def test_parts_of_plain_torch_return_no_bias(part):
    module = layer()
    linear = torch.nn.Linear(HIDDEN, HIDDEN)

    class Plain(torch.nn.Module):
        def forward(self, x, *args, **kwargs):
            return linear(x)

    module.set_submodule(part, Plain())
    x = torch.randn(3, 8, HIDDEN)
    h = x + module.self_attention(x)[0]
    expected = h + linear(h) if part == "layernorm_mlp" else h + module.layernorm_mlp(h)[0]
    assert_bits(module(x), expected)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"patched class"}))
def test_linears_that_do_more_run_by_themselves(kind):
    linears = [torch.nn.Linear(32, 32) for _ in range(3)]
    qshard.quantize_(torch.nn.ModuleList(linears), qshard.Float8BlockScaling())
    x = torch.randn(4, 32)
    assert swiglu_of_linears(x, *linears) is not None
    for linear in linears:
        with doing_more(linear, kind):
            assert swiglu_of_linears(x, *linears) is None
        linear.__class__ = nn.Linear
        vars(linear).pop("forward", None)
    assert swiglu_of_linears(x, *linears) is not None
    with patched(nn.Linear):
        assert swiglu_of_linears(x, *linears) is None
