"""Steps of random programs on whole models: training, gathers, errors. See program_steps.py."""

import contextlib
import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist
from dist_helpers import device
from models.weights import local
from program_meshes import own_part
from program_models import Interrupted, TwinLinear, optimizers_for
from program_steps import step
from program_values import check_gathered, difference
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

import qshard
from qshard.modules.fsdp2 import groups_of_state


def output_of(subject, seed):
    """The output for this rank's random input."""
    subject.catch_up()
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    x = torch.randn(4, subject.setup.layers[0].cols, generator=generator)
    return subject.model(x.to(device(), subject.setup.dtype))


def loss_of(subject, seed):
    return output_of(subject, seed).float().tanh().square().mean()


@dataclass
class Gradients:
    """This rank's parts of a subject's gradients. `exact`: to autograd's bits. On CUDA a linear of
    quantized weights adds to others in its GEMM, which where it multiplies dequantized weights rounds
    once."""

    subject: object
    exact: bool
    largest_before: float

    def tensors(self):
        grads = {name: param.grad for name, param in self.subject.params.items()}
        return {name: local(grad) for name, grad in grads.items() if grad is not None}

    def compare(self, twin):
        """Optimizers get equal gradients either way."""
        ours, theirs = self.tensors(), twin.tensors()
        if ours.keys() != theirs.keys():
            return f"gradients of {sorted(ours)}, expected of {sorted(theirs)}"
        for name, grad in ours.items():
            text = difference(grad, theirs[name])
            if text and (self.exact or not twin.nearly_equal(name, grad)):
                return f"gradient of {name}: {text}"
            theirs[name].copy_(grad)
        return None

    def nearly_equal(self, name, grad):
        """Up to the rounding of sums; a twin's."""
        _, layer, kind = name.split(".")
        own, module = self.tensors()[name], self.subject.model.layers[int(layer)]
        if kind != "weight" or not isinstance(module, TwinLinear) or own.shape != grad.shape:
            return False
        tolerance = 8 * torch.finfo(own.dtype).eps
        largest = max(self.largest_before, module.largest_sum)
        own, grad = own.double(), grad.double()
        return torch.allclose(grad, own, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def backward(subject, loss, steps=False):
    """`steps`: optimizers step in it."""
    before = [local(p.grad).double().abs() for p in subject.params.values() if p.grad is not None]
    largest_before = max((grad.max().item() for grad in before if grad.numel()), default=0.0)
    if not steps:
        subject.catch_up()  # backward gathers too
    loss.backward()
    exact = not before or device().type == "cpu"
    return Gradients(subject, exact=exact, largest_before=largest_before)


def total_norm(norm):
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


# -------------------------------------------------------------------------------- training


@step(
    6,
    lambda d: {
        "seed": d.seed(),
        "microbatches": d.choice((1, 1, 1, 2)),
        "synced": d.chance(0.7),
        "clip": d.chance(0.2),
        "steps": d.chance(0.85),
    },
)
def train(subject, seed, microbatches, synced, clip, steps):
    """Forward, backward, optimizer step; `steps` false: leaves the gradients to another step."""
    for i in range(microbatches):
        if subject.setup.sharded:
            subject.model.set_requires_gradient_sync(synced or i == microbatches - 1)
        loss = loss_of(subject, seed + i)
        yield loss.detach()
        gradients = backward(subject, loss)
        yield dataclasses.replace(gradients, exact=gradients.exact and i == 0)
    if clip:
        yield total_norm(torch.nn.utils.clip_grad_norm_(list(subject.params.values()), 0.1))
    if steps:
        subject.optimizer.step()
        yield
        subject.optimizer.zero_grad()


@step(2, lambda d: {"seed": d.seed(), "zero_after": d.chance(0.7)})
def optimize(subject, seed, zero_after):
    """A step with gradients of its own; ranks have different ones. Sometimes they stay."""
    for i, param in enumerate(subject.params.values()):
        generator = torch.Generator().manual_seed(1000 * (seed + i) + own_part())
        own = torch.randn(local(param).shape, generator=generator)
        param.grad = torch.zeros_like(param)
        local(param.grad).copy_(own)
    subject.optimizer.step()
    yield
    if zero_after:
        subject.optimizer.zero_grad(set_to_none=bool(seed % 2))


@step(2, lambda d: {"seed": d.seed(), "inference": not d.setup.sharded and d.chance(0.5)})
def evaluate(subject, seed, inference):
    """FSDP2 cannot gather again outside what it gathered in inference mode."""
    with torch.inference_mode() if inference else torch.no_grad():
        output = output_of(subject, seed)
    return output.clone()


@step(1.5, lambda d: {"kind": d.choice(optimizers_for(d.setup.sharded))})
def new_optimizer(subject, kind):
    subject.new_optimizer(kind)


@step(1.5, lambda d: {"seed": d.seed()})
def optimizer_in_backward(subject, seed):
    """Each parameter steps as soon as its gradient is there."""
    for module in subject.fsdp_modules():
        module.reshard()  # else forward may see other values than backward, and than the step
    # On CUDA a linear of quantized weights may round once where it adds to a gradient. Steps that
    # follow at once leave no time to say what was added.
    subject.optimizer.zero_grad()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in subject.params.values()}

    def step_one(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    hooks = [p.register_post_accumulate_grad_hook(step_one) for p in optimizers]
    try:
        loss = loss_of(subject, seed)
        yield loss.detach()
        yield backward(subject, loss, steps=True)
    finally:
        for hook in hooks:
            hook.remove()


@step(1, lambda d: {"seed": d.seed(), "factor": d.choice((0.5, -2.0))})
def scaled_gradients(subject, seed, factor):
    """A hook on every weight; FSDP2 calls none of them on its parameters."""
    hooks = [p.register_hook(lambda grad: grad * factor) for p in subject.params.values()]
    try:
        loss = loss_of(subject, seed)
        yield loss.detach()
        yield backward(subject, loss)
    finally:
        for hook in hooks:
            hook.remove()


@step(1, lambda d: {"seed": d.seed(), "inf": d.chance(0.5)} if not d.setup.sharded else None)
def grad_scaler(subject, seed, inf):
    """A step that an infinity makes a skipped one."""
    scaler = torch.amp.GradScaler(device().type, init_scale=8.0)
    loss = scaler.scale(loss_of(subject, seed))
    yield loss.detach()
    yield backward(subject, loss)
    # Fused SGD leaves its momentum uninitialised where its first step is skipped.
    if inf and not (isinstance(subject.optimizer, torch.optim.SGD) and subject.is_fused()):
        next(iter(subject.params.values())).grad.view(-1)[0] = float("inf")
    scaler.step(subject.optimizer)
    scaler.update()
    yield
    subject.optimizer.zero_grad()


# ------------------------------------------------------------------------- things that fail


@contextlib.contextmanager
def forward_that_fails(subject):
    """FSDP2's modules stay in forward after an error there, plain ones too: until the next one
    reshard() leaves a root gathered, and Module.to() moves what was gathered instead of the shards."""
    try:
        yield
    finally:
        for module in subject.fsdp_modules():
            for group in groups_of_state(module._get_fsdp_state()):
                group._training_state = TrainingState.IDLE


@step(1, lambda d: {"seed": d.seed(), "layer": d.rng.randrange(len(d.setup.layers))})
def fail_in_forward(subject, seed, layer):
    subject.model.fail_at = layer
    try:
        with forward_that_fails(subject):
            output_of(subject, seed)
    finally:
        subject.model.fail_at = None


@step(0.7, lambda d: {"seed": d.seed()})
def fail_by_shape(subject, seed):
    subject.catch_up()
    with forward_that_fails(subject):
        subject.model(torch.ones(2, subject.setup.layers[0].cols + 1, device=device()))


@step(0.7, lambda d: {"seed": d.seed()} if not d.setup.sharded else None)
def fail_in_backward(subject, seed):
    """Not under FSDP2, whose backward does not recover from an error: gradients stay away."""

    def interrupt(grad):
        raise Interrupted("in a hook")

    hook = subject.model.layers[0].weight.register_hook(interrupt)
    try:
        loss_of(subject, seed).backward()
    finally:
        hook.remove()


@step(0.7, lambda d: {"seed": d.seed()})
def fail_in_step(subject, seed):
    """A step post hook that raises: the flush that follows the step still has to come."""

    def interrupt(*_):
        raise Interrupted("after the step")

    loss = loss_of(subject, seed)
    yield loss.detach()
    yield backward(subject, loss)
    hook = subject.optimizer.register_step_post_hook(interrupt)
    try:
        subject.optimizer.step()
    finally:
        hook.remove()
        subject.optimizer.zero_grad()


# ------------------------------------------------------------------------ gathers and flushes


def draw_module(d):
    return {"module": d.rng.randrange(len(d.setup.layers) + 1)} if d.setup.sharded else None


@step(2, draw_module, reads=True)
def unshard(subject, module):
    modules = subject.fsdp_modules()
    modules[module % len(modules)].unshard()


@step(2, draw_module)
def reshard(subject, module):
    modules = subject.fsdp_modules()
    modules[module % len(modules)].reshard()


@step(2)
def flush(subject):
    if subject.quantized:
        qshard.flush(subject.model)


@step(2)
def inspect(subject):
    """Every gathered weight is the quantization of the whole value."""
    for module in subject.fsdp_modules():
        module.reshard()
    yield
    yield check_gathered(subject, subject.twin) if subject.quantized else None


@step(1)
def report(subject):
    """Looking at a model changes nothing."""
    if subject.quantized:
        qshard.report(subject.model)
