"""safetensors and huggingface_hub: models with masters are saved and loaded as plain ones are."""

import pytest
import torch
from client_models import RECIPES, batch, different, llama
from huggingface_hub import load_torch_model, save_torch_model
from safetensors.torch import load_file, load_model, save_file, save_model

import qshard


def trained(recipe, tied=False, **kwargs):
    model = qshard.quantize_(llama(tied), RECIPES[recipe], **kwargs)
    model(**batch(0)).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    return model


def losses(model):
    with torch.no_grad():
        return model(**batch(1)).loss.item()


@pytest.mark.parametrize("recipe", RECIPES)
def test_save_file_and_load_file(recipe, tmp_path):
    model = trained(recipe)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = qshard.quantize_(llama(seed=1), RECIPES[recipe])
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert not different(model, other) and losses(model) == losses(other)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_save_model_and_load_model(recipe, tied, tmp_path):
    model = trained(recipe, tied)
    save_model(model, str(tmp_path / "model.safetensors"))
    other = qshard.quantize_(llama(tied, seed=1), RECIPES[recipe])
    assert load_model(other, tmp_path / "model.safetensors") == (set(), [])
    assert not different(model, other) and losses(model) == losses(other)


@pytest.mark.parametrize("tied", [False, True])
def test_save_torch_model_in_shards(tied, tmp_path):
    model = trained("float8_blockwise", tied)
    save_torch_model(model, tmp_path, max_shard_size="16KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    other = qshard.quantize_(llama(tied, seed=1), RECIPES["float8_blockwise"])
    load_torch_model(other, tmp_path)
    assert not different(model, other) and losses(model) == losses(other)


def test_a_plain_model_reads_what_a_quantized_one_saved(tmp_path):
    model = trained("float8_blockwise")
    save_model(model, str(tmp_path / "model.safetensors"))
    plain = llama(seed=1)
    load_model(plain, tmp_path / "model.safetensors")
    assert not different(model, plain)


def test_without_masters_the_way_out_is_named(tmp_path):
    model = trained("float8_blockwise", keep_master=False)
    with pytest.raises(RuntimeError, match="without a master.*qshard::dequantize"):
        save_file(model.state_dict(), tmp_path / "model.safetensors")
    save_model(qshard.dequantize_(model), str(tmp_path / "model.safetensors"))
