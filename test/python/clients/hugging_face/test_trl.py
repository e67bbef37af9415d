"""TRL's SFTTrainer, in one process: a base without masters beside adapters, quantized by QuantizeCallback."""

import datasets
import torch
from client_models import RECIPES, VOCABULARY, Text, llama
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import qshard
from qshard.integrations.transformers import QuantizeCallback


def tokenizer():
    words = WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="1", eos_token="2", unk_token="0"
    )


def test_adapters_over_a_base_without_masters(tmp_path):
    rows = [{"input_ids": Text()[i]["input_ids"].tolist()} for i in range(16)]
    trainer = SFTTrainer(
        llama(),
        SFTConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=3, learning_rate=1e-2,
            logging_steps=1, report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, seed=1,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=LoraConfig(target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"),
        callbacks=[QuantizeCallback(RECIPES["nvfp4"], keep_master=False)],
    )
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if "lora" in n}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert all(qshard.is_quantized(p) for n, p in after.items() if "base_layer.weight" in n)
    assert not any(qshard.is_quantized(after[n]) for n in before)
    assert any(not torch.equal(after[n], p) for n, p in before.items())
