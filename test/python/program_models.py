"""What a random program runs on: a model with quantized weights, and a plain twin of it.

A twin's linear has the arithmetic of its quantized peer, with weights that are quantized afresh from
the twin's own plain ones: whatever the quantized model does with codes, scales and gathers, outputs
and gradients must be equal bit for bit.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from dist_helpers import device, full_mesh
from dist_models import FORMATS, RECIPES, local, mismatching_bytes
from helpers import fit, has_two_images, is_quantized, ops, shown_to_dgrad, value, weight
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
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

    def __str__(self):
        kind = f"{self.format}, {'master' if self.keep_master else 'no master'}"
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

    @property
    def sharded(self):
        return self.sharding != "none"

    def __str__(self):
        layers = "; ".join(map(str, self.layers))
        order = "quantized, then sharded" if self.quantize_first else "sharded, then quantized"
        how = f"{order} by {self.sharding}" if self.sharded else "not sharded"
        how += ", reshard after forward" if self.sharded and self.reshard else ""
        how += ", offloaded" if self.offload else ""
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
        layers.append(
            Layer(sizes[i + 1], sizes[i], format, rng.random() < 0.6, bias=rng.random() < 0.3)
        )
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
    )


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


def state_of(tensor):
    """Copies of what a quantized tensor remembers from step to step (delayed scaling)."""
    return {name: t.clone() for name, t in ops._state(tensor.detach()).items()}


def quantized_with(values, format, state, keep_master):
    """A whole value quantized on one device, by the given state where a format has one."""
    whole = ops.quantize(values, format, keep_master=keep_master and has_two_images(format))
    for name, tensor in ops._state(whole).items():
        tensor.copy_(state[name])
    return whole.copy_(values) if state else whole


STATE_OF_ACTIVATIONS = {"amax_history", "scaling_amax"}  # rows of a weight, its input and gradient


class TwinLinear(nn.Linear):
    """A plain linear that multiplies by what a quantized one would show of its weight."""

    def belong_to(self, peer, layer):
        # Not as an attribute: a module in it would be a submodule.
        self.__dict__.update(peer=peer, layer=layer, gathered_state=None, last_state=None)
        self.__dict__.setdefault("largest_sum", 0.0)  # of magnitudes, in any weight gradient so far

    def state(self):
        """Of the weight that of the peer's present gather, which FSDP2 keeps until it reshards it; of
        activations, in the last rows, what the peer has now."""
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

    def quantized(self, weight):
        layer = self.layer
        return quantized_with(weight.detach(), layer.format, self.state(), layer.keep_master)

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
            offload = CPUOffloadPolicy(pin_memory=False) if self.setup.offload else OffloadPolicy()
            kwargs = {
                "mesh": full_mesh(),
                "reshard_after_forward": self.setup.reshard,
                "offload_policy": offload,
            }
            for layer in model.layers if self.setup.sharding == "layers" else ():
                fully_shard(layer, **kwargs)
            fully_shard(model, **kwargs)
        if not self.setup.quantize_first:
            self.quantize(model)
        return model

    def quantize(self, model):
        for i, layer in enumerate(self.setup.layers):
            if layer.format and self.quantized:
                qshard.quantize_(
                    model,
                    RECIPES[layer.format],
                    keep_master=layer.keep_master,
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
        if name in self.registers:
            return self.registers[name]
        kind = {"w": "weight", "b": "bias"}[name[0]]
        return local(self.params[f"layers.{name[1:]}.{kind}"]).detach()

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
    ours, twin = (Subject(setup, seed, ranks, quantized) for quantized in (True, False))
    link(ours, twin)
    return ours, twin


def link(ours, twin):
    """Gives the twin's linears the arithmetic of their peers."""
    for layer, peer, own in zip(ours.setup.layers, ours.model.layers, twin.model.layers):
        if layer.format:
            own.belong_to(peer, layer)
            own.note_state()


# ---------------------------------------------------------------------- looking at the values


def difference(actual, expected):
    """What is different between two plain tensors, or None; NaNs are alike."""
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return (
            f"{actual.dtype} of shape {tuple(actual.shape)}, expected {expected.dtype} of shape "
            f"{tuple(expected.shape)}"
        )
    same = (actual == expected) & (actual.signbit() == expected.signbit())
    same |= actual.isnan() & expected.isnan()
    if same.all():
        return None
    where = (~same).nonzero()[0].tolist()
    got, want = actual[tuple(where)].item(), expected[tuple(where)].item()
    return f"{(~same).sum()} of {same.numel()} values differ, first at {where}: {got}, expected {want}"


def has_pending(tensor):
    return ops._storage_bytes(tensor)["pending"] > 0


def implausible(shown, values):
    """What is wrong with `shown` as codes of `values`, whatever other rows share their scales; or None.
    Zero is a code of every format: rounding, and clipping too, is off by the value itself at most."""
    bad = ((shown.double() - values.double()).abs() > values.double().abs()) & values.isfinite()
    if not bad.any():
        return None
    where = tuple(bad.nonzero()[0].tolist())
    got, want = shown[where].item(), values[where].item()
    return f"{bad.sum()} of {bad.numel()} codes are far off, first at {where}: {got} for {want}"


def rounded_like(values, tensor):
    """What a flush of `tensor` leaves of the whole `values`, or its codes show of them."""
    if values.numel() == 0:
        return values
    format, keep_master = ops.format(tensor), ops._keeps_master(tensor)
    matrix = values.reshape(-1, values.shape[-1]).contiguous()
    quantized = quantized_with(matrix, format, state_of(tensor), keep_master)
    return ops.dequantize(quantized, dtype=values.dtype).view(values.shape)


def whole_buffer(tensor):
    """The matrix that a quantized tensor is a window of, or None where other rows share its scales."""
    rows, cols, logical_rows, *_ = ops._pack(tensor)[2]
    return tensor.as_strided((rows, cols), (cols, 1), 0) if rows == logical_rows else None


def shares_no_scales(tensor):
    """Whether a quantized tensor is all of one matrix."""
    matrix = whole_buffer(tensor)
    return matrix is not None and matrix.shape == tensor.shape and tensor.is_contiguous()


def whole(param):
    """The whole value of a plain parameter."""
    param = param.detach()
    return param.to(device()).full_tensor() if isinstance(param, DTensor) else param


def local_rows(values, param):
    """The rows of this rank among those of a whole value, on the parameter's device."""
    if not isinstance(param, DTensor):
        return values
    mesh = param.device_mesh
    chunk = -(-values.shape[0] // mesh.size())
    rows = local(param).shape[0]
    first = min(chunk * mesh.get_local_rank(), values.shape[0])
    return values[first : first + rows].to(local(param).device)


def check_gathered(ours, twin):
    """I2: every gathered weight is the quantization of the twin's whole value. Returns what is not."""
    for module in ours.fsdp_modules():
        module.unshard()
    weights = {
        i: ours.model.layers[i].weight.detach()
        for i, layer in enumerate(ours.setup.layers)
        if layer.format
    }
    shown = {i: ops.dequantize(w) for i, w in weights.items() if is_quantized(w)}  # may flush
    twin.catch_up()
    for module in twin.fsdp_modules():
        module.unshard()  # it may have been gathered before, as ours, and show an older value
    wrong = []
    for i, gathered in weights.items():
        plain, name = twin.model.layers[i], f"layers.{i}.weight, gathered"
        if i not in shown:
            wrong.append(f"{name}, is plain")
            continue
        # Without a master values are made from codes. Quantized again they would have other bytes
        # where a block's largest code had been rounded up to 224 * 2^k.
        if plain.layer.keep_master:
            count = mismatching_bytes(gathered, plain.quantized(plain.weight))
            if count:
                wrong.append(f"{name}: {count} bytes differ")
        text = difference(shown[i], plain.shown(plain.weight))
        if text:
            wrong.append(f"{name}: {text}")
    for module in ours.fsdp_modules() + twin.fsdp_modules():
        module.reshard()
    return "; ".join(wrong) or None


def plain_value(tensor):
    return value(tensor).contiguous()
