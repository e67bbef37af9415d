"""fuse_ on models of transformers: what it recognises, and that they compute and save the same."""

import pytest
import torch
from accelerate.utils.dataclasses import get_module_class_from_name
from nn_helpers import assert_bits
from transformers import AutoConfig, AutoModelForCausalLM

import qshard
from qshard.fuse import norms_into_linears

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
# Norms of a layer: before attention and MLP; of queries and keys, too.
NORMS = {"llama": 2, "mistral": 2, "qwen2": 2, "qwen3": 4}
FED = {
    "input_layernorm": "self_attn.q_proj, k_proj, v_proj",
    "post_attention_layernorm": "mlp.gate_proj, up_proj",
}


def make(kind):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES))


def tokens_of(*shape):
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("kind", NORMS)
def test_fused_models_are_the_models(kind, quantized, tmp_path):
    plain, model = make(kind), make(kind)
    for one in (plain, model) if quantized else ():
        qshard.quantize_(one, qshard.Float8BlockScaling())
    report = qshard.fuse_(model)
    mlps = [row.name for row in report if "swiglu" in row.pattern]
    assert mlps == ["model.layers.0.mlp", "model.layers.1.mlp"]
    rotary = [row.name for row in report if row.pattern == "rotary embedding, by apply_rotary_pos_emb"]
    assert rotary == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    into = [(row.name, row.module, row.pattern) for row in report if " into " in row.pattern]
    patterns = [f"{norm} into {linears}" for norm, linears in FED.items()]
    layer = type(plain.model.layers[0]).__name__
    assert into == [(f"model.layers.{i}", layer, pattern) for i in range(2) for pattern in patterns]
    assert len(report) - len(mlps) - len(rotary) - len(into) == 2 * NORMS[kind] + 1  # and the last one
    tokens = tokens_of(2, 9)
    losses = [one(input_ids=tokens, labels=tokens).loss for one in (model, plain)]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=0)
    for loss in losses:
        loss.backward()
    del losses, loss
    # A code of an activation may be another one, where a norm was rounded once instead of twice.
    bound = 0.05 if quantized else 1e-4
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        error = (parameter.grad - other.grad).norm() / other.grad.norm()
        assert error < bound, (name, error)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(plain) and not info["missing_keys"]
    tokens = model.eval().generate(tokens[:1], max_new_tokens=3)
    assert tokens.shape == (1, 12)


def run(model, call=None):
    """The loss, gradients, and how many norms were left to linears."""
    model.zero_grad()
    tokens, project, count = tokens_of(2, 9), norms_into_linears._project, 0

    def counted(*args):
        nonlocal count
        projections = project(*args)
        count += projections is not None
        return projections

    norms_into_linears._project = counted
    try:
        loss = (model if call is None else call)(input_ids=tokens, labels=tokens).loss
        loss.backward()
    finally:
        norms_into_linears._project = project
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}, count


@pytest.mark.parametrize("kind", NORMS)
def test_norms_are_left_to_linears(kind, monkeypatch):
    model = qshard.quantize_(make(kind), qshard.Float8BlockScaling())
    qshard.fuse_(model)
    *got, count = run(model)
    assert count == 4
    for use_reentrant in (False, True):
        model.gradient_checkpointing_enable(dict(use_reentrant=use_reentrant))
        *again, count = run(model)
        assert count > 4
        assert_bits(again, got)
    model.gradient_checkpointing_disable()
    torch._dynamo.reset()
    *compiled, count = run(model, torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert count == 4
    torch.testing.assert_close(compiled, got)
    model(input_ids=tokens_of(2, 9), output_attentions=True)  # by hooks on attention, which stay
    *hooked, count = run(model)
    assert count == 2
    assert_bits(hooked, got)
    monkeypatch.setattr(norms_into_linears, "_project", lambda *_: None)
    *apart, count = run(model)
    assert count == 0
    assert_bits(apart, got)


def test_layers_keep_the_names_of_their_classes():
    """By which accelerate finds what to wrap, and device maps what not to split."""
    model = make("llama")
    qshard.fuse_(model)
    (name,) = model._no_split_modules
    kind = get_module_class_from_name(model, name)
    assert all(type(layer) is kind for layer in model.model.layers)
