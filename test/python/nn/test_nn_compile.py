"""qshard.nn under torch.compile(fullgraph=True): the numbers of eager mode."""

import pytest
import torch
from nn_helpers import RECIPES, randomize
from torch.utils.checkpoint import checkpoint

import qshard
from qshard import nn

BUDGET_S = 45  # Inductor's first compilation
HIDDEN = 32
LAYERS = {
    "default": {},
    "llama": {"fuse_qkv_params": True, "num_gqa_groups": 2, "bias": False, "activation": "swiglu",
              "normalization": "RMSNorm", "window_size": (3, 0), "qk_norm_type": "RMSNorm"},
    "decoder": {"layer_type": "decoder", "softcap": 3.0, "zero_centered_gamma": True},
    "parallel": {"parallel_attention_mlp": True, "activation": "clamped_swiglu"},
    "post": {"apply_residual_connection_post_layernorm": True, "output_layernorm": True,
             "self_attn_mask_type": "padding_causal"},
}
MODULES = {
    "Linear": lambda: nn.Linear(HIDDEN, 64, return_bias=True, parameters_split=("a", "b")),
    "LayerNorm": lambda: nn.LayerNorm(HIDDEN, zero_centered_gamma=True),
    "LayerNormLinear": lambda: nn.LayerNormLinear(HIDDEN, 64, return_layernorm_output=True),
    "LayerNormMLP": lambda: nn.LayerNormMLP(HIDDEN, 64, checkpoint=True, activation="geglu"),
}


def input_of(length=6, seed=1):
    values = torch.randn(length, 2, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return values.requires_grad_()


def make(name):
    if name in MODULES:
        return randomize(MODULES[name]())
    return randomize(
        nn.TransformerLayer(HIDDEN, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, **LAYERS[name])
    )


def results(function, module, name, x):
    more = {}
    if name == "decoder":
        more["encoder_output"] = input_of(4, seed=2).detach()
    if name == "post":
        more["attention_mask"] = torch.arange(6).view(1, 1, 1, 6).expand(2, 1, 1, 6) >= 4
    if name in LAYERS:
        more["rotary_pos_emb"] = nn.RotaryPositionEmbedding(HIDDEN // 4)(6)
    for tensor in (*module.parameters(), x):
        tensor.grad = None
    outputs = function(x, **more)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(output.square().sum() for output in outputs).backward()
    grads = [tensor.grad for tensor in (x, *module.parameters())]
    return [output.detach() for output in outputs], grads


def compare(module, name, backend):
    torch._dynamo.reset()
    x = input_of()
    eager = results(module, module, name, x)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    torch.testing.assert_close(results(compiled, module, name, x), eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name,format",
    [("LayerNorm", None), ("LayerNormMLP", None)]
    + [(name, "float8_blockwise") for name in (*LAYERS, *MODULES) if name != "LayerNorm"],
)
def test_fullgraph_equals_eager(name, format):
    module = make(name)
    if format:
        qshard.quantize_(module, RECIPES[format], filter_fn=lambda *_: True)
    compare(module, name, "aot_eager")


@pytest.mark.parametrize("format", RECIPES)
def test_modules_of_every_format_compile(format):
    module = qshard.quantize_(make("LayerNormLinear"), RECIPES[format], filter_fn=lambda *_: True)
    compare(module, "LayerNormLinear", "aot_eager")


def test_inductor_compiles_the_mlp():
    module = qshard.quantize_(make("LayerNormMLP"), RECIPES["float8_tensorwise"], filter_fn=lambda *_: True)
    compare(module, "LayerNormMLP", "inductor")


def test_activation_checkpointing_and_autocast():
    module = qshard.quantize_(make("llama"), RECIPES["float8_blockwise"])

    def function(x, **kwargs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return checkpoint(module, x, use_reentrant=False, **kwargs)

    torch._dynamo.reset()
    x = input_of()
    eager = results(function, module, "llama", x)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert eager[0][0].dtype == torch.bfloat16
    torch.testing.assert_close(results(compiled, module, "llama", x), eager, rtol=2e-2, atol=2e-2)


def test_main_grad_is_refused_by_name():
    module = nn.LayerNormLinear(HIDDEN, 64, fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros(64, HIDDEN)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="fuse_wgrad_accumulation is for eager mode"):
        torch.compile(module, fullgraph=True, backend="aot_eager")(input_of())
