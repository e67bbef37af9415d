"""Steps of random programs on a second model, on moves of a whole one, and on what factories of weights
make. See program_steps.py."""

import torch
from dist_helpers import device
from helpers import is_quantized
from models.weights import local
from program_alias_steps import draw_layer
from program_steps import step
from program_tensor_steps import random_like

import qshard

# --------------------------------------------------------------------------------- moves


def refilled(subject, number):
    """Writes all values, of which a narrower dtype or to_empty() has not kept the codes. Gradients are
    cleared: those that to_empty() makes have no values either."""
    subject.params.clear()
    subject.refresh()
    with torch.no_grad():
        for i, param in enumerate(subject.params.values()):
            param.grad = None
            tensor = local(param).detach()
            tensor.copy_(random_like(tensor, 1000 + i)) if number is None else tensor.mul_(number)
    subject.new_optimizer(subject.setup.optimizer)


MOVES = {
    "to device": lambda model, dtype: model.to(device()),
    "to cpu and back": lambda model, dtype: model.cpu().to(device()),
    "to dtype": lambda model, dtype: model.to(dtype),
    "to float and back": lambda model, dtype: model.float().to(dtype),
    "to bfloat16 and back": lambda model, dtype: model.bfloat16().to(dtype),
    "to half and back": lambda model, dtype: model.half().to(dtype),
    "to_empty": lambda model, dtype: model.to_empty(device=device()),
}


def draw_move_model(d):
    if d.setup.offload:
        return None
    return {"how": d.choice(MOVES), "number": d.number()}


@step(1.5, draw_move_model, reads=True)
def move_model(subject, how, number):
    """As a user moves a whole model, sharded or not; its optimizer is new."""
    for module in subject.fsdp_modules():
        module.reshard()
    yield
    MOVES[how](subject.model, subject.setup.dtype)
    refilled(subject, None if how == "to_empty" else number)


# ---------------------------------------------------------------------------- a second model


def copied_into(other, own):
    for to, source in zip(other, own):
        to.copy_(source)


def averaged(other, own):
    for to, source in zip(other, own):
        to.lerp_(source, 0.25)


def averaged_at_once(other, own):
    torch._foreach_lerp_(other, own, 0.25)


def copied_data(other, own):
    for to, source in zip(other, own):
        to.data.copy_(source.data)


BETWEEN_MODELS = {
    "copy_": copied_into,
    "lerp_": averaged,
    "foreach lerp_": averaged_at_once,
    "data copy_": copied_data,
    "reverse copy_": lambda other, own: copied_into(own, other),
    "reverse data copy_": lambda other, own: copied_data(own, other),
    "reverse lerp_": lambda other, own: averaged(own, other),
}


def draw_other_model(d):
    return {
        "seed": d.rng.randrange(1000),
        "how": d.choice(BETWEEN_MODELS),
        "flushes": d.chance(0.5),
        "layer": draw_layer(d),
        "into": d.new_register() if d.chance(0.5) else None,
    }


@step(2, draw_other_model, reads=True)
@torch.no_grad()
def other_model(subject, seed, how, flushes, layer, into):
    """Values from one model to another of the same kind, of which one weight may be kept."""
    for module in subject.fsdp_modules():
        module.reshard()
    model = subject.build(seed)
    if flushes and subject.quantized:
        qshard.flush(model)
    names = list(subject.params)
    others = dict(model.named_parameters())
    if into:
        subject.keep(into, local(others[f"layers.{layer}.weight"]).detach())
        subject.shares.add(into)
    yield
    taking_part = [name for name in names if settled(subject, name)]
    BETWEEN_MODELS[how](
        [local(others[name]).detach() for name in taking_part],
        [local(subject.params[name]).detach() for name in taking_part],
    )


def settled(subject, name):
    """Whether a twin knows the values that another model's parameter has: without a master they are
    rounded where it cannot see it."""
    layer = subject.setup.layers[int(name.split(".")[1])]
    return name.endswith("bias") or not layer.format or layer.keep_master


# ----------------------------------------------------------------------------------- factories


FACTORIES = {
    "new_zeros": lambda t, shape: t.new_zeros(shape),
    "new_empty": lambda t, shape: t.new_empty(shape),
    "new_ones": lambda t, shape: t.new_ones(shape),
    "new_full": lambda t, shape: t.new_full(shape, 2.0),
    "empty_like": lambda t, shape: torch.empty_like(t),
    "zeros_like": lambda t, shape: torch.zeros_like(t),
    "ones_like": lambda t, shape: torch.ones_like(t),
}
USES = {
    "mm": lambda x, t: x @ t.t(),
    "linear": torch.nn.functional.linear,
    "bmm": lambda x, t: torch.bmm(x[None], t.t()[None]),
    "outer product": lambda x, t: x @ (t.t() @ t),
    "embedding": lambda x, t: torch.nn.functional.embedding(
        torch.zeros(2, dtype=torch.int64, device=t.device), t
    ),
}


def draw_factory(d):
    return {
        "layer": draw_layer(d),
        "how": d.choice(FACTORIES),
        "shape": (d.choice((1, 4, 16, 33)), d.choice((1, 16, 64, 129))),
        "seed": d.seed(),
        "use": d.choice(USES),
        "rows": d.chance(0.3),
    }


@step(1.5, draw_factory, reads=True)
@torch.no_grad()
def factory(subject, layer, how, shape, seed, use, rows):
    """A tensor of a weight's factory is plain: filled with values, and used in products, it rounds none.
    `rows`: filled one after the other, as caches of tokens are."""
    weight = subject.tensor(f"w{layer}")
    tensor = FACTORIES[how](weight, shape)
    if tensor.numel() == 0:
        return None
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
    x = torch.randn(3, tensor.shape[1], generator=generator).to(tensor.device, tensor.dtype)
    for part in range(tensor.shape[0]) if rows else [slice(None)]:
        tensor[part].copy_(values[part])
    result = USES[use](x, tensor)
    assert not is_quantized(tensor) and not is_quantized(result)
    return result


@step(1, lambda d: {**draw_factory(d), "into": d.new_register()}, reads=True)
@torch.no_grad()
def factory_register(subject, layer, how, shape, seed, use, rows, into):
    """The same kept: a product must not round what it reads. Ranks without rows keep theirs, too:
    the steps that read it let ranks meet."""
    weight = subject.tensor(f"w{layer}")
    tensor = FACTORIES[how](weight, shape)
    if tensor.numel() > 0:
        generator = torch.Generator().manual_seed(seed)
        tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype))
        USES[use](torch.ones(3, tensor.shape[1], device=tensor.device, dtype=tensor.dtype), tensor)
        assert not is_quantized(tensor)
    subject.keep(into, tensor)
