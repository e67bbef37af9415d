"""Tiny models with experts, of transformers."""

import torch
import transformers

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

def make_model(name, implementation, seed=0):
    config_class, arguments, _ = MODELS[name]
    config = getattr(transformers, config_class)(**TINY, **arguments)
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation=implementation
    )


def tokens(seed):
    return torch.randint(1, 64, (2, 8), generator=torch.Generator().manual_seed(seed))
