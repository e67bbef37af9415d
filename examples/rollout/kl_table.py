"""KL between the trainer and a receiver, over the steps of the example: with the trainer's own codes, and with bf16 weights that
the receiver quantizes by transformers' own rule.

python examples/rollout/kl_table.py
"""

import torch
from rollout import Receiver, Trainer, arguments, kl, requantized
from tabulate import tabulate
from tqdm import trange

import qshard
from qshard.checkpoint import quantized_tensors


def of_bf16(model):
    """What a receiver makes of gathered bf16."""
    for name, parameter in model.named_parameters():
        if qshard.is_quantized(parameter):
            codes, scale = requantized(torch.ops.qshard.master(parameter.detach()))
            yield name, codes
            yield f"{name}_scale_inv", scale
        else:
            yield name, parameter.detach()


def main(argv=None):
    args = arguments(__doc__, argv)
    trainer, rows = Trainer(args), []
    receivers = [Receiver(args, trainer.ignored()) for _ in range(2)]
    for step in trange(args.steps):
        trainer.step(step)
        streams = quantized_tensors(trainer.model, layout="deepseek-fp8", plain_dtype=None), of_bf16(trainer.model)
        own, found = trainer.logits(), []
        for receiver, stream in zip(receivers, streams):
            receiver.load(stream)
            found.append(kl(own, receiver.logits()))
        rows.append((step, *found))
    chosen = [row for row in rows if row[0] in (0, 1, 9, 24, 49)]
    mean = ("mean", *(sum(row[i] for row in rows) / len(rows) for i in (1, 2)))
    headers = ["step", "KL, the trainer's codes", "KL, bf16 quantized again"]
    print(tabulate([*chosen, mean], headers=headers, floatfmt=".3e"))
    return rows


if __name__ == "__main__":
    main()
