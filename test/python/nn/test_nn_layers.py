"""MultiheadAttention and TransformerLayer: TransformerEngine's formulas in float64, parameter names and
shapes as read in TransformerEngine 2.20's sources, and its state dicts."""

import warnings

import pytest
import torch
from nn_helpers import RECIPES, assert_bits, doubles, gradients, on_devices, randomize
from reference import transformer as reference

import qshard
from qshard import nn
from qshard.nn import base

HIDDEN, FFN, HEADS, LENGTH, BATCH = 32, 48, 4, 7, 2


def input_of(length=LENGTH, seed=1, device="cpu", dtype=torch.float32, batch=BATCH):
    values = torch.randn(length, batch, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return values.to(device, dtype).requires_grad_()


def layer(**kwargs):
    return nn.TransformerLayer(
        HIDDEN, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, **kwargs
    )


def causal(queries=LENGTH):
    return torch.ones(queries, queries, dtype=torch.bool).tril()


# What a TransformerLayer is made with, and the oracle's options for it.
LAYERS = {
    "default": ({}, {}),
    "fused qkv": ({"fuse_qkv_params": True}, {"interleaved_weight": True}),
    "fused qkv by kind": ({"fuse_qkv_params": True, "qkv_weight_interleaved": False}, {}),
    "llama": (
        {"num_gqa_groups": 2, "fuse_qkv_params": True, "bias": False, "normalization": "RMSNorm",
         "activation": "swiglu", "layernorm_epsilon": 1e-3},
        {"interleaved_weight": True, "kind": "RMSNorm", "activation_name": "swiglu", "eps": 1e-3},
    ),
    "groups apart": ({"num_gqa_groups": 2}, {}),
    "zero centered": (
        {"zero_centered_gamma": True, "output_layernorm": True, "activation": "srelu"},
        {"zero_centered": True, "output_norm": True, "activation_name": "srelu"},
    ),
    "rms output": (
        {"output_layernorm": True, "normalization": "RMSNorm"},
        {"output_norm": True, "kind": "RMSNorm"},
    ),
    "normed residual": (
        {"apply_residual_connection_post_layernorm": True}, {"normed_residual": True}
    ),
    "parallel": ({"parallel_attention_mlp": True}, {"parallel": True}),
    "parallel without bias": ({"parallel_attention_mlp": True, "bias": False}, {"parallel": True}),
    "rms q and k": ({"qk_norm_type": "RMSNorm"}, {"qk_norm": "RMSNorm"}),
    "q and k before rotary": (
        {"qk_norm_type": "LayerNorm", "qk_norm_before_rope": True},
        {"qk_norm": "LayerNorm", "qk_norm_first": True},
    ),
    "l2 q and k": ({"qk_norm_type": "L2Normalization"}, {"qk_norm": "L2Normalization"}),
    "interleaved pairs": ({"rotary_pos_interleaved": True}, {"interleaved_pairs": True}),
    "channels": ({"kv_channels": 4, "softcap": 0.5}, {"softcap": 0.5}),
    "decoder": ({"layer_type": "decoder"}, {}),
    "fused decoder": (
        {"layer_type": "decoder", "fuse_qkv_params": True, "num_gqa_groups": 2,
         "apply_residual_connection_post_layernorm": True},
        {"interleaved_weight": True, "normed_residual": True},
    ),
}


@on_devices
@pytest.mark.pairwise
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("rotates", [False, True])
def test_transformer_layer_is_the_formula(device, name, layout, rotates):
    arguments, options = LAYERS[name]
    module = randomize(layer(attn_input_format=layout, device=device, **arguments))
    heads, groups = HEADS, arguments.get("num_gqa_groups", HEADS)
    x = input_of(device=device)
    given = {}
    options = dict(options)
    cross = "decoder" in name
    if cross:
        encoder_output = input_of(LENGTH if rotates else 5, seed=2, device=device).detach()
        length = encoder_output.shape[0]
        options["encoder_output"] = encoder_output.cpu().double()
        options["cross_allowed"] = torch.ones(LENGTH, length, dtype=torch.bool)
        given["encoder_output"] = encoder_output if layout == "sbhd" else encoder_output.transpose(0, 1)
    if rotates:
        channels = arguments.get("kv_channels", HIDDEN // HEADS)
        pairs = arguments.get("rotary_pos_interleaved", False)
        angles = nn.RotaryPositionEmbedding(channels, interleaved=pairs, device=device)(LENGTH + 2)
        given["rotary_pos_emb"] = angles
        options["angles"] = angles[:, 0, 0].cpu().double()
    y = module(x if layout == "sbhd" else x.transpose(0, 1), **given)
    y = y if layout == "sbhd" else y.transpose(0, 1)
    values = {n: v.requires_grad_() for n, v in doubles(module).items()}
    wide = x.detach().cpu().double().requires_grad_()
    expected = reference.transformer_layer(values, wide, causal(), heads, groups, **options)
    tolerance = {"rtol": 2e-4, "atol": 2e-4}
    torch.testing.assert_close(y.cpu().double(), expected, **tolerance)
    y.square().sum().backward()
    expected.square().sum().backward()
    scale = wide.grad.abs().max().item()
    torch.testing.assert_close(x.grad.cpu().double(), wide.grad, rtol=1e-3, atol=1e-5 * scale)
    for n, parameter in module.named_parameters():
        wanted = values[n].grad
        bound = 1e-4 * max(1, wanted.abs().max().item())
        torch.testing.assert_close(parameter.grad.cpu().double(), wanted, rtol=1e-3, atol=bound)


@pytest.mark.parametrize("input_layernorm", [False, True])
@pytest.mark.parametrize("attention_type", ["self", "cross"])
@pytest.mark.parametrize("fused", [False, True])
def test_multihead_attention_and_what_it_returns(input_layernorm, attention_type, fused):
    module = randomize(
        nn.MultiheadAttention(
            HIDDEN, HEADS, attention_dropout=0.0, input_layernorm=input_layernorm,
            attention_type=attention_type, fuse_qkv_params=fused, return_bias=True,
            return_layernorm_output=True, attn_mask_type="no_mask",
        )
    )
    x = input_of()
    cross = {"encoder_output": input_of(5, seed=2).detach()} if attention_type == "cross" else {}
    outputs = module(x, **cross)
    allowed = torch.ones(LENGTH, 5 if cross else LENGTH, dtype=torch.bool)
    expected = reference.multihead_attention(
        doubles(module), "", x.detach().double(), allowed, HEADS, HEADS, interleaved_weight=fused,
        **{name: value.double() for name, value in cross.items()},
    )
    expected = expected if input_layernorm else expected[:2]
    assert len(outputs) == len(expected)
    for output, wanted in zip(outputs, expected):
        torch.testing.assert_close(output.double(), wanted, rtol=1e-4, atol=1e-5)
    if cross:
        with pytest.raises(ValueError, match="needs encoder_output"):
            module(x)
    with pytest.raises(ValueError, match="three dimensions"):
        module(x[0])


@pytest.mark.parametrize("format", RECIPES)
@pytest.mark.parametrize("fused", [False, True])
def test_quantized_layers_are_their_parts(format, fused):
    """Bits of the modules that a layer is made of, one after the other."""
    module = randomize(layer(num_gqa_groups=4, fuse_qkv_params=fused, activation="swiglu"))
    if format == "mxfp8_1x32":
        module = randomize(nn.TransformerLayer(32, 32, 4, hidden_dropout=0.0, attention_dropout=0.0,
                                               fuse_qkv_params=fused, activation="swiglu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is left over
        qshard.quantize_(module, RECIPES[format])
    quantized = {n for n, p in module.named_parameters() if qshard.is_quantized(p)}
    assert quantized == {n for n, p in module.named_parameters() if p.dim() == 2}
    x = input_of(dtype=torch.bfloat16)

    def one_by_one(x):
        attention, mlp = module.self_attention, module.layernorm_mlp
        mixed = attention.layernorm_qkv(x)
        if fused:
            parts = mixed.view(LENGTH, BATCH, HEADS, 3, -1).unbind(3)
        else:
            parts = [part.view(LENGTH, BATCH, HEADS, -1) for part in mixed.chunk(3, -1)]
        context = attention.core_attention(*parts)
        output, bias = attention.proj(context)
        x = x + (output + bias)
        output, bias = mlp(x)
        return x + (output + bias)

    results = []
    for function in (module, one_by_one):
        module.zero_grad()
        x.grad = None
        y = function(x)
        y.float().square().sum().backward()
        results.append((y.detach(), x.grad, gradients(module)))
    assert_bits(results[0], results[1])


@pytest.mark.parametrize("attention_type", ["self", "cross"])
def test_parts_are_not_joined(attention_type):
    """Queries, keys and values by weights of their own are in no tensor of all of them, nor are gradients."""
    module = randomize(nn.MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0, input_layernorm=True,
                                             attention_type=attention_type, return_layernorm_output=True))
    qshard.quantize_(module, RECIPES["float8_tensorwise"])
    x = input_of().requires_grad_()
    with torch.profiler.profile(acc_events=True) as profiler:
        output, _ = module(x, encoder_output=x if attention_type == "cross" else None)
        output.sum().backward()
    ran = {event.key for event in profiler.key_averages()}
    assert not ran & {"aten::cat", "aten::split", "aten::split_with_sizes"}
    projection = module.layernorm_qkv if attention_type == "self" else module.key_value
    parts, whole = projection(x, as_parts=True), projection(x)
    if attention_type == "self":  # (outputs, normalized input)
        parts, whole = parts[0], whole[0]
    assert_bits(torch.cat(parts, -1), whole)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm", "L2Normalization"])
@pytest.mark.parametrize("first", [False, True])
def test_norms_of_queries_and_keys_in_mixed_precision(kind, first):
    """Parameters in fp32, activations in 16 bits, as of MixedPrecisionPolicy of some modules or autocast."""
    module = randomize(
        nn.MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0, qk_norm_type=kind,
                              qk_norm_before_rope=first)
    )
    angles = nn.RotaryPositionEmbedding(HIDDEN // HEADS)(LENGTH)
    x = input_of()
    expected = module(x, rotary_pos_emb=angles)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        by_autocast = module(x, rotary_pos_emb=angles)
    y = module(x.bfloat16(), rotary_pos_emb=angles)
    assert y.dtype == by_autocast.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.05)
    torch.testing.assert_close(by_autocast.float(), expected, rtol=0.05, atol=0.05)
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())


def test_dropouts_of_a_layer_are_for_training_alone():
    module = nn.TransformerLayer(HIDDEN, FFN, HEADS, hidden_dropout=0.3, drop_path_rate=0.5)
    x = input_of()
    torch.manual_seed(0)
    y = module(x)
    torch.manual_seed(0)
    assert_bits(module(x), y)
    assert not torch.equal(module(x), y)
    module.eval()
    assert_bits(module(x), module(x))
    # With the path dropped for sure nothing is added: only the residual is left.
    module.train()
    module.drop_path_rate = 1 - 1e-12
    assert_bits(module(x), x)


def test_masks_reach_attention():
    module = randomize(layer(layer_type="decoder"))
    x, encoder_output = input_of(), input_of(5, seed=2).detach()
    padding = torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.bool)
    padding[1, ..., 4:] = True
    of_keys = torch.zeros(BATCH, 1, 1, 5, dtype=torch.bool)
    of_keys[1, ..., 2:] = True
    y = module(
        x, attention_mask=padding, self_attn_mask_type="padding_causal", encoder_output=encoder_output,
        enc_dec_attn_mask=(padding, of_keys), enc_dec_attn_mask_type="padding", window_size=(2, 0),
    )
    alone = module(
        x[:4, 1:], encoder_output=encoder_output[:2, 1:], window_size=(2, 0)
    )
    torch.testing.assert_close(y[:4, 1:], alone)
    assert not torch.equal(module(x, encoder_output=encoder_output), y)


# ------------------------------------------------------------------------ names and shapes

ROWS = {"query": HIDDEN, "key": HIDDEN, "value": HIDDEN}


def linear(prefix, rows, columns, bias=True, parts=None):
    names = [f"{part}_" for part in parts] if parts else [""]
    sizes = list(parts.values()) if parts else [rows]
    result = {f"{prefix}{n}weight": (r, columns) for n, r in zip(names, sizes)}
    return result | ({f"{prefix}{n}bias": (r,) for n, r in zip(names, sizes)} if bias else {})


def norm(prefix, size=HIDDEN, bias=True):
    return {f"{prefix}weight": (size,)} | ({f"{prefix}bias": (size,)} if bias else {})


def mlp(prefix="", rows=FFN, bias=True, norm_bias=True):
    names = norm(f"{prefix}layer_norm_", bias=norm_bias)
    names |= {f"{prefix}fc1_weight": (rows, HIDDEN)} | ({f"{prefix}fc1_bias": (rows,)} if bias else {})
    names |= {f"{prefix}fc2_weight": (HIDDEN, FFN)}
    return names | ({f"{prefix}fc2_bias": (HIDDEN,)} if bias else {})


DEFAULT = {
    **norm("self_attention.layernorm_qkv.layer_norm_"),
    **linear("self_attention.layernorm_qkv.", 0, HIDDEN, parts=ROWS),
    **linear("self_attention.proj.", HIDDEN, HIDDEN),
    **mlp("layernorm_mlp."),
}
EXTRA = ("self_attention.layernorm_qkv.", "self_attention.core_attention.", "self_attention.proj.",
         "layernorm_mlp.")
# Modules, and the names and shapes of their parameters in TransformerEngine 2.20, in its order.
NAMES = {
    "LayerNorm": (lambda: nn.LayerNorm(HIDDEN), norm("")),
    "RMSNorm": (lambda: nn.RMSNorm((4, 8)), {"weight": (4, 8)}),
    "Linear": (lambda: nn.Linear(HIDDEN, FFN), linear("", FFN, HIDDEN)),
    "Linear, parts": (
        lambda: nn.Linear(HIDDEN, FFN, parameters_split={"a_": 16, "b": 32}),
        {"a_weight": (16, HIDDEN), "b_weight": (32, HIDDEN), "a_bias": (16,), "b_bias": (32,)},
    ),
    "LayerNormLinear": (
        lambda: nn.LayerNormLinear(HIDDEN, FFN), norm("layer_norm_") | linear("", FFN, HIDDEN)
    ),
    "LayerNormLinear, RMSNorm": (
        lambda: nn.LayerNormLinear(HIDDEN, FFN, normalization="RMSNorm", bias=False),
        {"layer_norm_weight": (HIDDEN,), "weight": (FFN, HIDDEN)},
    ),
    "LayerNormMLP": (lambda: nn.LayerNormMLP(HIDDEN, FFN), mlp()),
    "LayerNormMLP, swiglu": (
        lambda: nn.LayerNormMLP(HIDDEN, FFN, activation="swiglu", normalization="RMSNorm", bias=False),
        mlp(rows=2 * FFN, bias=False, norm_bias=False),
    ),
    "DotProductAttention": (lambda: nn.DotProductAttention(4, 8), {}),
    "DotProductAttention, learnable": (
        lambda: nn.DotProductAttention(4, 8, softmax_type="learnable"), {"softmax_offset": (4,)}
    ),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(HIDDEN, HEADS),
        linear("qkv.", 0, HIDDEN, parts=ROWS) | linear("proj.", HIDDEN, HIDDEN),
    ),
    "MultiheadAttention, cross": (
        lambda: nn.MultiheadAttention(HIDDEN, HEADS, attention_type="cross", num_gqa_groups=2),
        linear("query_layer.", HIDDEN, HIDDEN)
        | linear("key_value.", 0, HIDDEN, parts={"key": 16, "value": 16})
        | linear("proj.", HIDDEN, HIDDEN),
    ),
    "MultiheadAttention, cross and fused": (
        lambda: nn.MultiheadAttention(HIDDEN, HEADS, attention_type="cross", fuse_qkv_params=True,
                                      input_layernorm=True, qk_norm_type="LayerNorm"),
        norm("q_norm.", 8) | norm("k_norm.", 8) | norm("layernorm_query.layer_norm_")
        | linear("layernorm_query.", HIDDEN, HIDDEN) | linear("key_value.", 2 * HIDDEN, HIDDEN)
        | linear("proj.", HIDDEN, HIDDEN),
    ),
    "TransformerLayer": (layer, DEFAULT),
    "TransformerLayer, llama": (
        lambda: layer(fuse_qkv_params=True, num_gqa_groups=2, bias=False, normalization="RMSNorm",
                      activation="swiglu"),
        {"self_attention.layernorm_qkv.layer_norm_weight": (HIDDEN,),
         "self_attention.layernorm_qkv.weight": (HIDDEN + 2 * 16, HIDDEN),
         "self_attention.proj.weight": (HIDDEN, HIDDEN),
         **mlp("layernorm_mlp.", 2 * FFN, bias=False, norm_bias=False)},
    ),
    "TransformerLayer, decoder": (
        lambda: layer(layer_type="decoder"),
        {**{n: s for n, s in DEFAULT.items() if n.startswith("self")},
         **norm("inter_attention.layernorm_query.layer_norm_"),
         **linear("inter_attention.layernorm_query.", 0, HIDDEN, parts={"query": HIDDEN}),
         **linear("inter_attention.key_value.", 0, HIDDEN, parts={"key": HIDDEN, "value": HIDDEN}),
         **linear("inter_attention.proj.", HIDDEN, HIDDEN),
         **mlp("layernorm_mlp.")},
    ),
    "TransformerLayer, output_layernorm": (
        lambda: layer(output_layernorm=True),
        {**linear("self_attention.qkv.", 0, HIDDEN, parts=ROWS),
         **linear("self_attention.proj.", HIDDEN, HIDDEN), **mlp("layernorm_mlp."),
         **norm("layernorm.")},
    ),
}


@pytest.mark.parametrize("kind", NAMES)
def test_names_and_shapes(kind):
    make, expected = NAMES[kind]
    module = make()
    assert {n: tuple(t.shape) for n, t in module.state_dict().items()} == expected
    assert [n for n, _ in module.named_parameters()] == list(expected)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_of_transformer_engine(quantized, assign):
    """Its _extra_state is ignored, with one warning; everything else is checked as ever."""
    source = randomize(layer(), seed=3)
    checkpoint = {name: value.clone() for name, value in source.state_dict().items()}
    checkpoint |= {f"{module}_extra_state": torch.zeros(9, dtype=torch.uint8) for module in EXTRA}
    names = set(checkpoint)
    module = torch.nn.Sequential(layer())
    if quantized:
        qshard.quantize_(module, RECIPES["float8_blockwise"])
        qshard.quantize_(source, RECIPES["float8_blockwise"])
    base.warn_of_extra_state.cache_clear()
    with pytest.warns(UserWarning, match="_extra_state") as caught:
        result = module.load_state_dict({f"0.{n}": v for n, v in checkpoint.items()}, assign=assign)
    assert len(caught) == 1 and not result.missing_keys and not result.unexpected_keys
    assert set(checkpoint) == names
    x = input_of()
    assert_bits(module(x), source(x))
    assert all(qshard.is_quantized(p) == (quantized and p.dim() == 2) for p in module.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.load_state_dict({f"0.{n}": v for n, v in checkpoint.items()})
    del checkpoint["layernorm_mlp.fc1_weight"]
    with pytest.raises(RuntimeError, match="Missing key.*fc1_weight"):
        module.load_state_dict({f"0.{n}": v for n, v in checkpoint.items()})
    with pytest.raises(RuntimeError, match="Unexpected key.*other"):
        module.load_state_dict({**module.state_dict(), "0.other": torch.zeros(1)})


def test_delayed_scaling_of_several_weights():
    """The state of each weight of a module is its own, and goes through state_dicts."""
    first, second = (
        qshard.quantize_(randomize(layer()), qshard.DelayedScaling(amax_history_len=4)) for _ in "ab"
    )
    optimizer = torch.optim.AdamW(first.parameters(), lr=0.1)
    for seed in range(3):
        first(input_of(seed=seed)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    second.load_state_dict(first.state_dict())
    names = [name for name, _ in first.named_buffers()]
    assert sum(name.startswith("layernorm_mlp.fc2_weight_") for name in names) == sum(
        name.startswith("layernorm_mlp.fc1_weight_") for name in names) > 0
    for name, tensor in first.state_dict().items():
        assert_bits(second.state_dict()[name] + 0, tensor + 0)
    x = input_of()
    assert_bits(second(x), first(x))
    qshard.dequantize_(second)
    assert {n: tuple(t.shape) for n, t in second.state_dict().items()} == DEFAULT
    assert second(x).isfinite().all()


@pytest.mark.parametrize("quantized", [False, True])
def test_on_the_meta_device(quantized):
    """Shapes and flops without memory."""
    with torch.device("meta"):
        module = layer(self_attn_mask_type="padding_causal", softcap=3.0)
        if quantized:
            qshard.quantize_(module, RECIPES["float8_blockwise"])
        mask = torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.bool)
        x = torch.randn(LENGTH, BATCH, HIDDEN, dtype=torch.bfloat16)
        y = module(x, attention_mask=mask)
    assert y.is_meta and (y.shape, y.dtype) == (x.shape, x.dtype)


NOT_IMPLEMENTED = {"ub_tp_comm_overlap": True, "ub_overlap_rs_dgrad": True, "tp_size": 2}


@pytest.mark.parametrize("argument", NOT_IMPLEMENTED)
def test_a_layer_names_the_argument_that_it_does_not_take(argument):
    with pytest.raises(NotImplementedError, match=f"TransformerLayer: {argument}="):
        layer(**{argument: NOT_IMPLEMENTED[argument]})


def test_a_layer_takes_arguments_that_change_nothing():
    layer(ub_overlap_ag=False, set_parallel_mode=True, seq_length=8, micro_batch_size=2)


@pytest.mark.parametrize("arguments, error", [
    ({"layer_type": "both"}, "layer_type='both' is none of"),
    ({"parallel_attention_mlp": True, "layer_type": "decoder"}, "does not go with layer_type"),
    ({"parallel_attention_mlp": True, "output_layernorm": True}, "does not go with output"),
    ({"fuse_wgrad_accumulation": True}, "needs fuse_qkv_params"),
    ({"self_attn_mask_type": "some"}, "attn_mask_type='some'"),
    ({"qk_norm_type": "Group"}, "qk_norm_type='Group'"),
])
def test_a_layer_names_the_choice_that_there_is_not(arguments, error):
    with pytest.raises(ValueError, match=error):
        layer(**arguments)


def test_a_layer_names_the_format_of_inputs_that_it_does_not_take():
    with pytest.raises(NotImplementedError, match="qkv_format='thd'"):
        layer(attn_input_format="thd")


def test_a_forward_refuses_inference_params():
    with pytest.raises(NotImplementedError, match="inference_params"):
        layer()(input_of(), inference_params=object())


@pytest.mark.parametrize("is_attention", [False, True], ids=["layer", "attention"])
def test_a_forward_refuses_fused_dispatch(is_attention):
    module = layer(parallel_attention_mlp=True).self_attention if is_attention else layer()
    module(input_of(), thd_attention_policy_dispatch="auto")
    with pytest.raises(NotImplementedError, match="thd_attention_policy_dispatch='fused'"):
        module(input_of(), thd_attention_policy_dispatch="fused")


def test_main_grads_of_a_layer():
    module = layer(fuse_qkv_params=True, fuse_wgrad_accumulation=True)
    other = layer(fuse_qkv_params=True)
    other.load_state_dict(module.state_dict())
    matrices = [n for n, p in module.named_parameters() if p.dim() == 2]
    for name in matrices:
        weight = module.get_parameter(name)
        weight.main_grad = torch.full(weight.shape, 7.0)
    x = input_of()
    module(x, is_first_microbatch=True).sum().backward()
    module(x, is_first_microbatch=False).sum().backward()
    for _ in range(2):
        other(x).sum().backward()
    for name in matrices:
        torch.testing.assert_close(
            module.get_parameter(name).main_grad, other.get_parameter(name).grad
        )
