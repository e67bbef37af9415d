"""What a random program runs on: a model with quantized weights, and a plain twin of it.

A twin's linear has the arithmetic of its quantized peer, with weights that are quantized afresh from
the twin's own plain ones: whatever the quantized model does with codes, scales and gathers, outputs
and gradients must be equal bit for bit.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dist_helpers import device
from helpers import fit, has_two_images, ops, shown_to_dgrad, weight
from models.formats import FORMATS, RECIPES
from models.weights import local
from program_meshes import lay_out, mesh_of
from program_values import difference, quantized_with, state_of
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import qshard

# Ragged: one row, fewer rows than ranks, no multiple of 16, cut blocks of every format.
SIZES = (1, 2, 3, 16, 32, 33, 47, 64, 129)
ADAMW, ADAM, SGD = torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD
OPTIMIZERS = {
    "AdamW fused": lambda p: ADAMW(p, lr=1e-2, fused=True),
    "AdamW foreach": lambda p: ADAMW(p, lr=1e-2, foreach=True),
    "AdamW for-loop": lambda p: ADAMW(p, lr=1e-2, foreach=False),
    "Adam amsgrad": lambda p: ADAM(p, lr=1e-2, amsgrad=True, weight_decay=0.1, foreach=True),
    "Adam maximize": lambda p: ADAM(p, lr=1e-2, maximize=True, foreach=False),
    "SGD momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SGD nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}


class Interrupted(Exception):
    """What programs raise in the middle of things."""


# --------------------------------------------------------------------------------- the setup


@dataclass(frozen=True)
class Layer:
    """A linear of (rows, cols); `format` is None for one that stays plain."""

    rows: int
    cols: int
    format: str | None
    keep_master: bool
    bias: bool
    stochastic: bool = False  # rounding of what optimizer steps make; without a master

    def __str__(self):
        kind = f"{self.format}, {'master' if self.keep_master else 'no master'}"
        kind += ", stochastic" if self.stochastic else ""
        bias = ", bias" if self.bias else ""
        return f"{self.rows}x{self.cols} {kind if self.format else 'plain'}{bias}"


@dataclass(frozen=True)
class Setup:
    """A model, and how it is sharded and optimized."""

    layers: tuple[Layer, ...]
    dtype: torch.dtype
    sharding: str  # "none", "layers" (each linear and the rest), or "root"
    reshard: bool  # after forward
    quantize_first: bool  # before it is sharded
    optimizer: str
    offload: bool = False
    mesh: str = "shards"  # or "hsdp", two replicas of as many shards, or "replicate", by replicate()
    seed_per_rank: bool = False  # of torch's generators when weights are quantized

    @property
    def sharded(self):
        return self.sharding != "none"

    def shards(self, ranks):
        """How many ranks hold different rows of a weight, where it is sharded."""
        return {"shards": ranks, "hsdp": ranks // 2, "replicate": 1}[self.mesh]

    def __str__(self):
        layers = "; ".join(map(str, self.layers))
        order = "quantized, then sharded" if self.quantize_first else "sharded, then quantized"
        how = f"{order} by {self.sharding}" if self.sharded else "not sharded"
        how += ", reshard after forward" if self.sharded and self.reshard else ""
        how += ", offloaded" if self.offload else ""
        how += f", {self.mesh}" if self.mesh != "shards" else ""
        how += ", a seed per rank" if self.seed_per_rank else ""
        return f"{str(self.dtype)[6:]}; {layers}; {how}; {self.optimizer}"


def optimizers_for(sharded):
    """DTensor has no fused SGD."""
    return [name for name in OPTIMIZERS if not (sharded and name == "SGD fused")]


def draw_setup(rng, ranks, device_type):
    """A random setup."""
    count = rng.choice((2, 2, 3))
    sizes = [rng.choice(SIZES) for _ in range(count + 1)]
    layers = []
    for i in range(count):
        format = rng.choice(FORMATS) if i == 0 or rng.random() < 0.8 else None
        if format and fit(format, sizes[i + 1]) != sizes[i + 1]:
            sizes[i + 1] = rng.choice((32, 64))
        keep_master, bias = rng.random() < 0.6, rng.random() < 0.3
        plain = keep_master or not format or has_two_images(format)
        # On GPUs a twin quantizes its weights for each linear, and by nearest rounding.
        stochastic = not plain and device_type == "cpu" and rng.random() < 0.2
        layers.append(Layer(sizes[i + 1], sizes[i], format, keep_master, bias, stochastic))
    sharding = rng.choice(("layers", "layers", "root", "none" if ranks > 1 else "root"))
    if ranks == 1 and rng.random() < 0.6:
        sharding = "none"
    return Setup(
        tuple(layers),
        rng.choice((torch.float32, torch.float32, torch.bfloat16)),
        sharding,
        reshard=rng.random() < 0.6,
        quantize_first=rng.random() < 0.7,
        optimizer=rng.choice(optimizers_for(sharding != "none")),
        offload=device_type == "cuda" and sharding != "none" and rng.random() < 0.2,
        mesh=draw_mesh(rng, ranks) if sharding != "none" else "shards",
        seed_per_rank=ranks > 1 and rng.random() < 0.3,
    )


def draw_mesh(rng, ranks):
    if ranks == 1 or rng.random() < 0.7:
        return "shards"
    return rng.choice(("hsdp", "replicate")) if ranks % 2 == 0 else "replicate"


# -------------------------------------------------------------------------------- the models


class Net(nn.Module):
    """Linears with something in between. `fail_at`: the layer whose turn raises Interrupted."""

    def __init__(self, setup, is_twin):
        super().__init__()
        kinds = [TwinLinear if is_twin and x.format else nn.Linear for x in setup.layers]
        self.layers = nn.ModuleList(
            kind(x.cols, x.rows, bias=x.bias) for kind, x in zip(kinds, setup.layers)
        )
        self.fail_at = None

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if i == self.fail_at:
                raise Interrupted(f"before layer {i}")
            x = F.gelu(layer(x))
        return x


STATE_OF_ACTIVATIONS = {"amax_history", "scaling_amax"}  # rows of a weight, its input and gradient


class TwinLinear(nn.Linear):
    """A plain linear that multiplies by what a quantized one would show of its weight."""

    def belong_to(self, peer, layer):
        # Not as an attribute: a module in it would be a submodule.
        self.__dict__.update(peer=peer, layer=layer, gathered_state=None, last_state=None)
        self.__dict__.setdefault("largest_sum", 0.0)  # of magnitudes, in any weight gradient so far
        self.__dict__.setdefault("rounded", None)

    def state(self):
        """The weight's state is that of the peer's present gather, which FSDP2 keeps until it reshards it; the
        activations', in the last rows, is what the peer has now."""
        if self.gathered_state is None:
            return self.last_state
        merged = {name: state.clone() for name, state in self.gathered_state.items()}
        for name in STATE_OF_ACTIVATIONS & merged.keys():
            merged[name][-2:] = self.last_state[name][-2:]
        return merged

    def note_state(self):
        """To be called after what may have flushed, gathered or resharded the peer's weight."""
        self.last_state = state_of(local(self.peer.weight))
        if isinstance(self.weight, DTensor):
            self.gathered_state = None
        elif self.gathered_state is None:
            self.gathered_state = self.last_state

    def note_gradient(self, x, grad):
        largest = (grad.double().abs().t() @ x.double().abs()).max().item()
        self.largest_sum = max(self.largest_sum, largest)

    def note_rounded(self, quantized):
        """Its values, without a master, are now what this shows."""
        self.rounded = quantized

    def quantized(self, weight):
        layer, state = self.layer, self.state()
        # NVFP4's values, quantized again, may be others: where a block's scale is so small that it has
        # few bits, the largest code of the block need not be 6, and then the next scale is smaller.
        if self.rounded is not None and not state:
            if difference(ops.dequantize(self.rounded, dtype=weight.dtype), weight.detach()) is None:
                return self.rounded
        return quantized_with(weight.detach(), layer.format, state, layer.keep_master)

    def shown(self, weight):
        """Without a master the value is what codes show, and is rounded already."""
        if not self.layer.keep_master:
            return weight.detach()
        return ops.dequantize(self.quantized(weight))

    def shown_to_dgrad(self, weight):
        if not has_two_images(self.layer.format):
            return self.shown(weight)
        return shown_to_dgrad(self.quantized(weight))

    def forward(self, x):
        arithmetic = LinearOnCpu if x.device.type == "cpu" else LinearOfQuantized
        return arithmetic.apply(x, self.weight, self, self.bias)


class LinearOnCpu(torch.autograd.Function):
    """What a linear of quantized weights is on CPU: products with their dequantized values. Backward
    asks again what they are: FSDP2 may have gathered others by then."""

    @staticmethod
    def forward(ctx, x, weight, module, bias):
        ctx.save_for_backward(x, weight)
        ctx.module = module
        return F.linear(x, module.shown(weight), bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.module.note_gradient(x, grad)
        needs_x, needs_weight, _, needs_bias = ctx.needs_input_grad
        return (
            grad @ ctx.module.shown_to_dgrad(weight).to(x.dtype) if needs_x else None,
            grad.t() @ x if needs_weight else None,
            None,
            grad.sum(0) if needs_bias else None,
        )


class LinearOfQuantized(torch.autograd.Function):
    """On GPUs activations are quantized too: the same kernels, with a weight of this process alone."""

    @staticmethod
    def forward(ctx, x, weight, module, bias):
        ctx.save_for_backward(x, weight, bias)
        ctx.module = module
        return F.linear(x, module.quantized(weight), bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias = ctx.saved_tensors
        ctx.module.note_gradient(x, grad)
        inputs = x, ctx.module.quantized(weight), bias
        inputs = [t if t is None else t.detach().requires_grad_() for t in inputs]
        with torch.enable_grad():
            output = F.linear(*inputs)
        given = [t for t in inputs if t is not None]
        x_grad, weight_grad, *bias_grad = torch.autograd.grad(output, given, grad)
        return x_grad, weight_grad, None, *(bias_grad or [None])


class Subject:
    """One of the pair: a model, its optimizer, and the tensors that a program has made beside them."""

    def __init__(self, setup, seed, ranks, quantized):
        self.setup, self.ranks, self.quantized = setup, ranks, quantized
        self.registers = {}  # name: tensor
        self.narrowed = set()  # registers whose codes may be of a wider value
        self.shares = set()  # registers that may be shares of a parameter
        self.homes = {}  # of a register that is a view of a parameter or of another register: its name
        self.saved = {}  # checkpoints, by the name of the step that made them
        self.params = {}
        self.catch_up = lambda: None  # a twin's: takes over what flushes have rounded
        self.model = self.build(seed)
        self.refresh()
        self.new_optimizer(setup.optimizer)

    def build(self, seed):
        model = Net(self.setup, is_twin=not self.quantized)
        for i, layer in enumerate(model.layers):
            with torch.no_grad():
                layer.weight.copy_(weight(*layer.weight.shape, seed=seed + i) / 4)
                if layer.bias is not None:
                    layer.bias.copy_(weight(1, *layer.bias.shape, seed=seed + i)[0])
        model.to(device(), self.setup.dtype)
        if self.setup.quantize_first:
            self.quantize(model)
        if self.setup.sharded:
            self.shard(model)
        if not self.setup.quantize_first:
            self.quantize(model)
        return model

    def shard(self, model):
        wrap, kwargs = fully_shard, {"reshard_after_forward": self.setup.reshard}
        if self.setup.offload:
            kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if self.setup.mesh == "replicate":
            wrap = replicate
            del kwargs["reshard_after_forward"]
        for layer in model.layers if self.setup.sharding == "layers" else ():
            wrap(layer, mesh=mesh_of(self.setup, self.ranks), **kwargs)
        wrap(model, mesh=mesh_of(self.setup, self.ranks), **kwargs)

    def quantize(self, model):
        if self.setup.seed_per_rank:
            torch.manual_seed(dist.get_rank())
        for i, layer in enumerate(self.setup.layers):
            if layer.format and self.quantized:
                qshard.quantize_(
                    model,
                    RECIPES[layer.format],
                    keep_master=layer.keep_master,
                    stochastic_rounding=layer.stochastic,
                    filter_fn=lambda _, name, i=i: name == f"layers.{i}",
                )

    def refresh(self):
        """Notes the sharded parameters: while weights are gathered a model shows those instead."""
        for name, param in self.model.named_parameters():
            if isinstance(param, DTensor) or not self.setup.sharded:
                self.params[name] = param

    def new_optimizer(self, kind):
        self.optimizer = OPTIMIZERS[kind](list(self.params.values()))

    def is_fused(self):
        return any(group.get("fused") for group in self.optimizer.param_groups)

    def tensor(self, name):
        """The local tensor of a parameter (w0: layers.0.weight, b0: its bias), or a register."""
        return self.registers[name] if name in self.registers else self.variable(name).detach()

    def variable(self, name):
        """The same, and not detached."""
        if name in self.registers:
            return self.registers[name]
        return local(self.params[f"layers.{name[1:]}.{'weight' if name[0] == 'w' else 'bias'}"])

    def keep(self, name, tensor, home=None):
        """Makes `tensor` a register. `home`: whose memory it shares."""
        self.registers[name] = tensor
        if home:
            self.homes[name] = home

    def home(self, name):
        return self.homes.get(name, name)

    def fsdp_modules(self):
        return [module for module in self.model.modules() if hasattr(module, "unshard")]

    def replace_model(self, model):
        self.model = model
        self.params.clear()
        self.refresh()


def make_pair(setup, seed, ranks):
    """(the quantized subject, its plain twin)."""
    lay_out(setup, ranks)
    ours, twin = (Subject(setup, seed, ranks, quantized) for quantized in (True, False))
    link(ours, twin)
    return ours, twin


def link(ours, twin):
    """Gives the twin's linears the arithmetic of their peers."""
    for layer, peer, own in zip(ours.setup.layers, ours.model.layers, twin.model.layers):
        if layer.format:
            own.belong_to(peer, layer)
            own.note_state()
