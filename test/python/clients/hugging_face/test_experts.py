"""Experts of transformers' models: each way that it computes them multiplies by the codes of a quantized stack."""

import contextlib
import warnings

import pytest
import torch
from dist_helpers import on_ranks
from helpers import assert_same, is_quantized, ops

import qshard

transformers = pytest.importorskip("transformers", "5.0", reason="needs transformers >= 5.0")

TINY = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
# By name: the class of the configuration, its arguments, and how many stacks the model has.
MODELS = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}, 4),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "moe_intermediate_size": 48, "head_dim": 16},
        4,
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "n_routed_experts": 8,
            "moe_intermediate_size": 48,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            **LATENT,
        },
        2,
    ),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "head_dim": 16}, 4),
}
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")


@contextlib.contextmanager
def in_one_order():
    """batched_mm reads an expert several times: threads add their gradients up in any order, else."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def make_model(name, implementation, seed=0):
    config_class, arguments, _ = MODELS[name]
    config = getattr(transformers, config_class)(**TINY, **arguments)
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation=implementation
    )


def quantize_stacks(model, format, keep_master):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # trained weights without a master
        qshard.quantize_(
            model,
            format,
            filter_fn=lambda *_: False,
            parameter_fn=lambda parameter, name: parameter.dim() == 3,
            keep_master=keep_master,
        )
    return model


def tokens(seed):
    return torch.randint(1, 64, (2, 8), generator=torch.Generator().manual_seed(seed))


def twin_of(model, name, implementation):
    """A plain model whose experts hold what the codes stand for."""
    twin = make_model(name, implementation)
    values = {
        key: ops.dequantize(p) if is_quantized(p) else p.detach()
        for key, p in model.named_parameters()
    }
    twin.load_state_dict(values, strict=False)
    return twin


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("format", ["float8_tensorwise", "float8_blockwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("name", MODELS)
def test_experts_multiply_codes(name, format, keep_master, implementation):
    model = quantize_stacks(make_model(name, implementation), format, keep_master)
    stacks = [p for p in model.parameters() if is_quantized(p)]
    assert len(stacks) == MODELS[name][2]
    twin = twin_of(model, name, implementation)
    ids = tokens(1)
    logits, expected = model(ids).logits, twin(ids).logits
    assert_same(logits, expected)
    with in_one_order():
        logits.square().mean().backward()
        expected.square().mean().backward()
    gradients = {key: p.grad for key, p in twin.named_parameters()}
    for key, p in model.named_parameters():
        if p.grad is not None or gradients[key] is not None:
            assert_same(p.grad, gradients[key], key)
    with torch.no_grad():
        settings = {"max_new_tokens": 4, "do_sample": False}
        assert_same(model.generate(ids, **settings), twin.generate(ids, **settings))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", MODELS)
@on_ranks(2, devices=("cpu",))
def test_experts_under_fsdp2(name, implementation):
    from torch.distributed.fsdp import fully_shard

    model, sharded = (
        quantize_stacks(make_model(name, implementation), "float8_blockwise", True)
        for _ in range(2)
    )
    for layer in sharded.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, sharded)]
    for step in range(3):
        logits = [m(tokens(step)).logits for m in (model, sharded)]
        assert_same(logits[1], logits[0])
        for output, optimizer in zip(logits, optimizers):
            with in_one_order():
                output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
