"""What the two examples share: a small Llama that is trained in FP8 under FSDP2, and a stock transformers model in FP8 form
that receives its codes. Everything runs on CPUs."""

import argparse
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.distributed.fsdp import fully_shard
from transformers.integrations import finegrained_fp8

import qshard
from qshard.checkpoint import ignored_modules

BLOCK = 128
OPTIONS = {"layout": "deepseek-fp8", "plain_dtype": torch.float32}  # what the receivers read


def arguments(description, argv=None):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def config_of(args):
    return transformers.LlamaConfig(
        vocab_size=256, hidden_size=args.dim, intermediate_size=2 * args.dim, num_hidden_layers=args.layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, attn_implementation="eager",
    )


def tokens(args, step):
    """Bytes of a pattern that is easy to learn, each step others."""
    generator = torch.Generator().manual_seed(1000 * args.seed + step)
    start = torch.randint(256, (4, 1), generator=generator)
    return (start + 3 * torch.arange(32)) % 256


class Trainer:
    """A Llama with weights in blocks of FP8, sharded by FSDP2 over a mesh, or on one device."""

    def __init__(self, args, mesh=None):
        torch.manual_seed(args.seed)
        self.args = args
        self.model = transformers.LlamaForCausalLM(config_of(args))
        recipe = qshard.Float8BlockScaling(emulate=True)  # activations in codes on a CPU, too
        qshard.quantize_(self.model, recipe, filter_fn=lambda module, name: "layers" in name)
        if mesh is not None:
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, number):
        batch = tokens(self.args, number)
        loss = self.model(batch, labels=batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    @torch.no_grad()
    def logits(self):
        return self.model(tokens(self.args, -1)).logits.float()

    def ignored(self):
        return ignored_modules(self.model, layout="deepseek-fp8")


class Receiver:
    """A stock model whose linears are transformers' FP8Linear, as from_pretrained makes of an FP8 checkpoint."""

    def __init__(self, args, ignored):
        self.args = args
        self.model = transformers.LlamaForCausalLM(config_of(args)).eval().requires_grad_(False)
        quantization = transformers.FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK), modules_to_not_convert=ignored)
        finegrained_fp8.replace_with_fp8_linear(
            self.model, modules_to_not_convert=ignored, quantization_config=quantization, pre_quantized=True
        )
        finegrained_fp8.fp8_linear = fp8_linear  # its kernels are for GPUs
        self.parameters = dict(self.model.named_parameters())

    def load(self, named_tensors):
        """Makes tensors its parameters, without a copy."""
        for name, tensor in named_tensors:
            self.parameters[name].requires_grad_(False)
            module, _, attribute = name.rpartition(".")
            parameter = torch.nn.Parameter(tensor, requires_grad=False)
            setattr(self.model.get_submodule(module), attribute, parameter)

    @torch.no_grad()
    def logits(self):
        return self.model(tokens(self.args, -1)).logits.float()


def quantized_activations(x):
    """FP8 of 1x128 blocks with the scale amax / 448, as transformers' kernel makes them, and back."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def fp8_linear(input, weight, weight_scale_inv, block_size=None, bias=None, *_):
    """What transformers' kernel computes, in fp32 on any device."""
    scale = weight_scale_inv.float().repeat_interleave(BLOCK, 0)[: weight.shape[0]]
    scale = scale.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
    return F.linear(quantized_activations(input), weight.float() * scale, bias).to(input.dtype)


def requantized(weight):
    """transformers' own rule, on the bf16 of a weight: what a receiver of bf16 makes of it."""
    config = transformers.FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK))
    quantizer = finegrained_fp8.Fp8Quantize(SimpleNamespace(quantization_config=config))
    made = quantizer._quantize_one("module.weight", weight.bfloat16())
    return made["module.weight"], made["module.weight_scale_inv"]


def kl(trainer, receiver):
    """The distributions that logits stand for, on average over positions."""
    log_p, log_q = (logits.double().log_softmax(-1) for logits in (trainer, receiver))
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()


def show(step, loss, trainer, receiver):
    """A line of text: the loss, the first logits of both, and their KL."""
    first = [" ".join(f"{value:.3f}" for value in logits[0, -1, :3]) for logits in (trainer, receiver)]
    return f"step {step}: loss {loss:.3f}, logits {first[0]} | {first[1]}, KL {kl(trainer, receiver):.3e}"


def group_of_trainers(ranks):
    """A mesh of the first ranks of the world, which train; the others receive."""
    return dist.device_mesh.DeviceMesh("cpu", torch.arange(ranks))
