"""PEFT on two ranks: LoRA and DoRA over a frozen quantized base under FSDP2, and what it gathers."""

import pytest
import torch
import torch.distributed as dist
from client_models import RECIPES, batch, llama
from collective_calls import gathers
from dist_helpers import on_ranks
from helpers import ceil_div, row_bytes
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import qshard


def build(recipe, keep_master, use_dora):
    model = qshard.quantize_(llama(), RECIPES[recipe], keep_master=keep_master)
    torch.manual_seed(5)
    names = ["q_proj", "v_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=names, use_dora=use_dora))


def shard(model):
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def train(model):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for number in range(3):
        loss = model(**batch(number)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values(model):
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() * 1
        for name, p in model.named_parameters()
    }


def bytes_sent(model):
    """By one rank, of every parameter once: those of its row image, or of its fp32 rows."""
    result = {}
    for name, param in model.named_parameters():
        rows = ceil_div(param.shape[0], dist.get_world_size())
        columns = param.shape[1:].numel()
        is_code = qshard.is_quantized(param)
        format = qshard.ops.format(param.to_local()) if is_code else None
        result[name] = rows * (row_bytes(format, columns) if is_code else 4 * columns)
    return result


# DoRA takes norms of the base's values: of masters in one process, of gathered codes under FSDP2.
@pytest.mark.parametrize(
    "keep_master, use_dora",
    [(True, False), (False, False), (False, True)],
    ids=["lora-master", "lora", "dora"],
)
@pytest.mark.parametrize(
    "recipe, bytes_per_element",
    # NVFP4's rows of 32: 16 bytes of codes, 2 of scales, and 14 to a multiple of 16.
    [("float8_blockwise", 1), ("float8_delayed", 1), ("nvfp4", 1 / 2 + 1 / 16 + 14 / 32)],
)
@on_ranks(2, devices=("cpu",))
def test_adapters_over_a_sharded_frozen_base(recipe, bytes_per_element, keep_master, use_dora):
    single = build(recipe, keep_master, use_dora)
    model = shard(build(recipe, keep_master, use_dora))
    expected = bytes_sent(model)
    (name,) = [n for n in expected if n.endswith("0.self_attn.q_proj.base_layer.weight")]
    assert expected[name] == 32 * 32 * bytes_per_element / dist.get_world_size()
    with gathers(lambda input: input.numel() * input.element_size()) as sent, torch.no_grad():
        model(**batch(0))
    assert sum(sent) == sum(expected.values())
    model.reshard()  # FSDP2 leaves the root's unsharded
    # Both ranks see the same batch, so that the gradients' average is each rank's.
    before = values(model)
    losses = train(model)
    assert losses == train(single)
    after, alone = values(model), values(single)
    for name, value in after.items():
        assert torch.equal(value, alone[name]), name
        is_adapter = "lora_" in name
        assert is_adapter or torch.equal(value, before[name]), name
