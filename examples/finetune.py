"""Transformers' Trainer and PEFT on bundled text, a Llama of bytes, quantized beside plain:

    python examples/finetune.py           trains all weights on the standard library's sources
    python examples/finetune.py --lora    trains LoRA adapters over it, frozen, on qshard's documentation

The second takes the model of the first from --out, or makes it. Needs transformers, accelerate and peft.
Writes <out>/<run>.png (losses) and the models.
"""

import argparse
from pathlib import Path

import matplotlib
import torch
from data import StandardLibrary, to_tensor
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import qshard

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

RECIPES = {
    "float8_tensorwise": qshard.Float8CurrentScaling(),
    "float8_delayed": qshard.DelayedScaling(amax_history_len=16),
    "float8_blockwise": qshard.Float8BlockScaling(),
    "mxfp8": qshard.MXFP8BlockScaling(),
    "nvfp4": qshard.NVFP4BlockScaling(),
}


class Windows(torch.utils.data.Dataset):
    """Pieces of a text of bytes, one after the other."""

    def __init__(self, text, length):
        self.text, self.length = text, length

    def __len__(self):
        return len(self.text) // self.length

    def __getitem__(self, i):
        tokens = self.text[i * self.length : (i + 1) * self.length].long()
        return {"input_ids": tokens, "labels": tokens}


def llama(args):
    torch.manual_seed(args.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=args.width, intermediate_size=3 * args.width,
            num_hidden_layers=args.layers, num_attention_heads=4, num_key_value_heads=4,
            max_position_embeddings=args.length,
        )
    )


def train(model, text, args, name, learning_rate):
    """The losses of the Trainer, whose progress is shown; and the trained model in <out>/<name>."""
    arguments = TrainingArguments(
        output_dir=str(args.out / "trainer" / name), max_steps=args.steps, logging_steps=1,
        per_device_train_batch_size=args.batch, learning_rate=learning_rate, seed=args.seed,
        save_strategy="no", report_to=[], lr_scheduler_type="cosine",
    )
    print(f"{name}: {sum(p.numel() for p in model.parameters() if p.requires_grad):,} weights are trained")
    trainer = Trainer(model, arguments, train_dataset=Windows(text, args.length))
    trainer.train()
    print(*qshard.report(model, optimizer=trainer.optimizer).clients, sep="\n")
    trainer.save_model(str(args.out / name))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def all_weights(args):
    text = StandardLibrary(args.length, args.seed).train
    recipe = RECIPES[args.format]
    quantized = qshard.quantize_(llama(args), recipe, persistent_state=False)
    return {
        "plain": train(llama(args), text, args, "plain", 1e-3),
        args.format: train(quantized, text, args, args.format, 1e-3),
    }


def adapters(args):
    base = args.out / "plain"
    if not base.exists():
        all_weights(args)
    pages = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
    text = to_tensor(page.read_bytes() for page in pages)
    losses = {}
    for name in ("plain", args.format):
        model = LlamaForCausalLM.from_pretrained(base)
        if name != "plain":
            qshard.quantize_(model, RECIPES[name], keep_master=False, persistent_state=False)
        torch.manual_seed(args.seed)
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
        losses[name] = train(model, text, args, f"{name}-lora", 1e-2)
    return losses


def plot(losses, title, path):
    figure, axes = plt.subplots(figsize=(8, 5))
    for name, values in losses.items():
        axes.plot(range(1, len(values) + 1), values, linewidth=0.9, label=f"{name}: {values[-1]:.3f}")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=title)
    axes.legend(title="last loss")
    figure.savefig(path, dpi=120)
    print(f"losses: {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--format", default="float8_blockwise", choices=RECIPES)
    parser.add_argument("--out", type=Path, default=Path("finetune-out"))
    for name, default in dict(steps=100, batch=8, length=128, width=128, layers=4, seed=0).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    title = "LoRA over a frozen base" if args.lora else "all weights"
    losses = adapters(args) if args.lora else all_weights(args)
    plot(losses, title, args.out / ("lora.png" if args.lora else "losses.png"))


if __name__ == "__main__":
    main()
