"""quantize_ of transformers' models with experts: which stacks it takes, what it says of those it leaves, weight_only."""

import warnings

import pytest
import torch
from helpers import is_quantized, ops
from torch import nn

import qshard
from qshard import module_state

pytest.importorskip("transformers", "5.0", reason="needs transformers >= 5.0")
from moe_models import MODELS, make_model, tokens  # noqa: E402

LEFT = "look like weights and were left plain"
is_not_head = lambda module, name: name != "lm_head"  # noqa: E731 as the quick start has it


def said_by(*args, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        qshard.quantize_(*args, **options)
    return [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


def stacks_of(model):
    return [p for p in model.parameters() if p.dim() == 3]


@pytest.mark.parametrize("options", [{}, {"filter_fn": is_not_head}], ids=["all", "filter_fn"])
@pytest.mark.parametrize("name", MODELS)
def test_stacks_are_taken(name, options):
    model = make_model(name, "grouped_mm")
    said = said_by(model, "float8_blockwise", **options)
    assert not any(LEFT in text for text in said)
    assert len(stacks_of(model)) == MODELS[name][2] and all(map(is_quantized, stacks_of(model)))
    biases = [p for key, p in model.named_parameters() if key.endswith("_bias")]
    assert len(biases) == (4 if name == "gpt_oss" else 0) and not any(map(is_quantized, biases))
    model(tokens(1)).logits.square().mean().backward()
    assert all(p.grad is not None for p in stacks_of(model))
    before = [ops.dequantize(p.detach()) for p in stacks_of(model)]
    qshard.dequantize_(model)
    assert not any(map(is_quantized, model.parameters()))
    for p, value in zip(stacks_of(model), before):
        torch.testing.assert_close(p.detach(), value, rtol=0.1, atol=0.1)


def test_what_stays_plain_is_said_once_and_can_be_meant():
    leave = {"filter_fn": lambda module, name: isinstance(module, nn.Linear)}
    for name in MODELS:
        model = make_model(name, "grouped_mm")
        said = said_by(model, "mxfp8", **leave)
        assert len(said) == 1 and LEFT in said[0] and "gate_up_proj" in said[0]
        assert "filter_fn is asked of experts of transformers" in said[0]
        assert not any(map(is_quantized, stacks_of(model)))
        assert not said_by(model, "mxfp8", parameter_fn=lambda *_: False, **leave)
    dynamic = said_by(make_model("mixtral", "eager"), "mxfp8", weights="dynamic", **leave)
    assert len(dynamic) == 1 and 'weights="dynamic" is of linears' in dynamic[0]


def test_layers_and_stacks_are_chosen_by_name():
    model = make_model("mixtral", "grouped_mm")
    said = said_by(model, "nvfp4", filter_fn=lambda module, name: "layers.0" in name)
    assert len(said) == 1 and "model.layers.1.mlp.experts.gate_up_proj" in said[0] and "layers.0" not in said[0]
    first, second = (layer.mlp.experts for layer in model.model.layers)
    assert is_quantized(first.gate_up_proj) and is_quantized(first.down_proj)
    assert not is_quantized(second.gate_up_proj)
    chosen = {"filter_fn": lambda *_: False, "parameter_fn": lambda p, name: name.endswith("1.mlp.experts.down_proj")}
    assert not said_by(model, "nvfp4", **chosen)
    assert is_quantized(second.down_proj) and not is_quantized(second.gate_up_proj)


class Lookalike(nn.Module):
    """The attributes of transformers' experts, which it multiplies in a way of its own."""

    has_gate, has_bias, is_transposed, is_concatenated, num_experts = True, False, False, True, 4

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 64, 32))
        self.down_proj = nn.Parameter(torch.randn(4, 32, 32))

    def forward(self, x):
        return x @ self.gate_up_proj.sum(0).T


class Inherits(type(make_model("mixtral", "eager").model.layers[0].mlp.experts)):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states @ self.down_proj[0]


def test_experts_are_known_by_their_forward_alone():
    config = make_model("mixtral", "eager").config
    for other in (Lookalike(), Inherits(config)):
        model = nn.Sequential(nn.Linear(32, 32), other)
        said = said_by(model, "mxfp8", filter_fn=lambda *_: True)
        assert len(said) == 1 and "1.gate_up_proj, 1.down_proj look like weights" in said[0]
        assert not is_quantized(other.gate_up_proj)


def test_stacks_in_another_low_bit_format_are_left():
    model = make_model("mixtral", "eager")
    for p in stacks_of(model):
        p.requires_grad_(False)
        p.data = p.data.to(torch.float8_e4m3fn)
    said_by(model, "mxfp8")
    assert {p.dtype for p in stacks_of(model)} == {torch.float8_e4m3fn}


# ---------------------------------------------------------------------------------------- weight_only


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_weight_only_is_refused_where_it_would_not_be_kept(implementation):
    model = make_model("mixtral", implementation)
    with pytest.raises(TypeError, match=f'on model.layers.0.*"{implementation}" multi.*set_experts_impl'):
        qshard.quantize_(model, "nvfp4", weight_only=True)
    assert not any(map(is_quantized, model.parameters()))
    said = said_by(model, "nvfp4", weight_only=True, filter_fn=lambda m, _: isinstance(m, nn.Linear))
    assert len(said) == 1 and LEFT in said[0]
    with pytest.raises(TypeError, match="weight_only cannot act on 0.down_proj: Lookalike multiplies"):
        chosen = {"parameter_fn": lambda p, name: name == "0.down_proj"}
        qshard.quantize_(nn.Sequential(Lookalike(), nn.Linear(32, 32)), "nvfp4", weight_only=True, **chosen)


@pytest.mark.parametrize("name", MODELS)
def test_weight_only_leaves_activations(name):
    model, plain = make_model(name, "qshard"), make_model(name, "qshard")
    qshard.quantize_(model, "nvfp4", weight_only=True, filter_fn=is_not_head)
    plain.load_state_dict({k: ops.dequantize(p) if is_quantized(p) else p for k, p in model.named_parameters()}, False)
    torch.testing.assert_close(model(tokens(1)).logits, plain(tokens(1)).logits)
    experts = [m for m in model.modules() if hasattr(m, "gate_up_proj") and m.gate_up_proj is not None]
    assert all(module_state.find(m).weight_only for m in experts if hasattr(m, "num_experts"))
    model.set_experts_implementation("eager")
    with pytest.raises(RuntimeError, match='weight_only=True, which experts_implementation="eager" would ignore'):
        model(tokens(1))
    qshard.dequantize_(model)(tokens(1))  # asks for nothing any more
