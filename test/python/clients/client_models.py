"""A small Llama and its data, for tests with the real packages."""

import contextlib

import torch
import torch._dynamo
from transformers import LlamaConfig, LlamaForCausalLM

import qshard

VOCABULARY = 96
RECIPES = {
    "float8_rowwise": qshard.Float8RowwiseScaling(),
    "float8_blockwise": qshard.Float8BlockScaling(),
    "float8_delayed": qshard.DelayedScaling(amax_history_len=3),
    "mxfp8": qshard.MXFP8BlockScaling(),
    "nvfp4": qshard.NVFP4BlockScaling(),
}


def llama(tied=False, seed=0):
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=56,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            tie_word_embeddings=tied,
        )
    )


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        tokens = torch.randint(VOCABULARY, (16,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def batch(number, size=4):
    rows = [Text()[number * size + i]["input_ids"] for i in range(size)]
    tokens = torch.stack(rows)
    return {"input_ids": tokens, "labels": tokens}


@contextlib.contextmanager
def compiling():
    """Within it something is compiled, whatever was before."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    try:
        yield
        assert counters["frames"]["ok"] > 0
    finally:
        torch._dynamo.reset()


def assert_near(losses, others, rtol=1e-5):
    """For a compiled model, whose graphs may sum in another order."""
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(others), rtol=rtol, atol=0)


def values(model):
    return {name: p.detach() * 1 for name, p in model.named_parameters()}


def different(model, other):
    a, b = values(model), values(other)
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def losses_logged(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
