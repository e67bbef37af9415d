"""fuse_ on models of transformers: what it recognises, and that they compute and save the same."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import qshard

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
# Norms of a layer: before attention and MLP; of queries and keys, too.
NORMS = {"llama": 2, "mistral": 2, "qwen2": 2, "qwen3": 4}


def make(kind):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES))


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
    assert len(report) - len(mlps) - len(rotary) == 2 * NORMS[kind] + 1  # and the last one
    tokens = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
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
