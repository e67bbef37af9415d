"""Steps of random programs that save, load and copy whole models. See program_steps.py."""

import copy
import io
from dataclasses import dataclass

import torch
import torch.distributed.checkpoint as dcp
from dist_helpers import device
from helpers import is_quantized, ops
from models.weights import local
from program_alias_steps import draw_layer
from program_steps import step
from program_values import difference, plain_value, rounded_like, state_of
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import qshard

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FULL_EVERYWHERE = StateDictOptions(full_state_dict=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
STATE = ("weight_amax_history", "weight_scaling_amax", "weight_rounding")


def detached(state_dict):
    return {name: tensor.detach().clone() for name, tensor in state_dict.items()}


def local_bytes(subject):
    file = io.BytesIO()
    torch.save({n: local(t).detach() for n, t in subject.model.state_dict().items()}, file)
    return file.getvalue()


def load_bytes(subject, saved):
    loaded = torch.load(io.BytesIO(saved), weights_only=True)
    with torch.no_grad():
        for name, tensor in subject.model.state_dict().items():
            local(tensor).copy_(loaded[name])


def of_the_lowest_rank():
    """If several ranks have a tensor, as of models that are not sharded, DCP takes one rank's, by default that of
    the rank with fewest bytes to write: not the same one of a model and its twin."""
    return DefaultSavePlanner(dedup_save_to_lowest_rank=True)


def dcp_save(subject, name):
    folder = subject.folder / f"{name}-{subject.quantized}"
    state = {"model": subject.model.state_dict()}
    dcp.save(state, checkpoint_id=folder, planner=of_the_lowest_rank())
    return name


def dcp_load(subject, name, quantized=None):
    quantized = subject.quantized if quantized is None else quantized
    folder = subject.folder / f"{name}-{quantized}"
    dcp.load({"model": subject.model.state_dict()}, checkpoint_id=folder)


def dcp_save_beside_a_write(subject, name):
    folder = subject.folder / f"{name}-{subject.quantized}"
    state = {"model": subject.model.state_dict()}
    saving = dcp.async_save(
        state,
        checkpoint_id=folder,
        process_group=subject.gloo_group,
        planner=of_the_lowest_rank(),
    )
    with torch.no_grad():
        for param in subject.params.values():
            local(param).detach().mul_(0.75)
    saving.result()
    return name


def load_full(options):
    return lambda subject, saved: set_model_state_dict(subject.model, dict(saved), options=options)


# What each saves, and how that is loaded.
CHECKPOINTS = {
    "state_dict": (
        lambda subject: detached(subject.model.state_dict()),
        lambda subject, saved: subject.model.load_state_dict(saved),
    ),
    "deep copy": (
        lambda subject: copy.deepcopy(subject.model.state_dict()),
        lambda subject, saved: subject.model.load_state_dict(saved),
    ),
    "sharded": (
        lambda subject: detached(get_model_state_dict(subject.model)),
        lambda subject, saved: set_model_state_dict(subject.model, dict(saved)),
    ),
    "full": (
        lambda subject: detached(get_model_state_dict(subject.model, options=FULL)),
        load_full(BROADCAST),
    ),
    "full everywhere": (
        lambda subject: detached(get_model_state_dict(subject.model, options=FULL_EVERYWHERE)),
        load_full(FULL_EVERYWHERE),
    ),
    "torch.save": (local_bytes, load_bytes),
}
DCP = ("dcp", "dcp", "dcp async")


def draw_save(d):
    kind = d.choice(DCP) if d.chance(0.3) else d.choice(CHECKPOINTS)
    return {"kind": kind, "into": d.new_checkpoint(kind)}


@step(2, draw_save, reads=True)
def save(subject, kind, into):
    if kind in CHECKPOINTS:
        subject.saved[into] = kind, CHECKPOINTS[kind][0](subject)
    else:
        save = dcp_save if kind == "dcp" else dcp_save_beside_a_write
        subject.saved[into] = "dcp", save(subject, into)
    return checkpoint_values(subject.saved[into][1])


def checkpoint_values(saved):
    if not isinstance(saved, dict):
        return None
    values = {n: plain_value(local(t)) for n, t in saved.items() if not n.endswith(STATE)}
    return {name: value.to(device()) for name, value in values.items()}


def shows_shards(subject):
    """Whether a sharded model shows its shards, which it does not after a forward that failed."""
    for module in subject.fsdp_modules():
        module.reshard()
    return not subject.setup.sharded or all(isinstance(p, DTensor) for p in subject.model.parameters())


def draw_load(d):
    if not d.checkpoints:
        return None
    return {"checkpoint": d.choice(d.checkpoints), "of_the_other": d.chance(0.5)}


@step(3, draw_load)
def load(subject, checkpoint, of_the_other):
    """`of_the_other`: a plain model's checkpoint into the quantized one, and the reverse."""
    if checkpoint not in subject.saved:
        return
    if not shows_shards(subject):
        return  # torch's loads copy a part of the state dict, and raise
    kind, saved = subject.saved[checkpoint]
    if kind == "dcp":
        dcp_load(subject, saved, subject.quantized != of_the_other)
    else:
        CHECKPOINTS[kind][1](subject, saved)


# ---------------------------------------------------------------------------- a second model


def made_by_factories(subject, seed):
    """As layers that take their weight from one that there is."""
    model = subject.build(seed)
    for layer in model.layers:
        layer.weight = torch.nn.Parameter(layer.weight.detach().new_zeros(layer.weight.shape))
    return model


def copied_in_inference(subject, seed):
    with torch.inference_mode():
        return copy.deepcopy(subject.model)


OTHERS = {
    "built": lambda subject, seed: subject.build(seed),
    "deep copy": lambda subject, seed: copy.deepcopy(subject.model),
    "deep copy in inference mode": copied_in_inference,
    "factories": made_by_factories,
}


def load_state(subject, model, name):
    dcp_save(subject, name)
    folder = subject.folder / f"{name}-{subject.quantized}"
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)


def average_state(subject, model, name):
    own = subject.model.state_dict()
    for key, value in model.state_dict().items():
        if value.is_floating_point() and not key.endswith(STATE):
            local(value).lerp_(plain_value(local(own[key]).detach()), 0.5)


LOADS = {"dcp": load_state, "lerp_ of state_dict": average_state}


@dataclass
class Multiplied:
    """What the linear of a model multiplies by; of a twin, the value."""

    values: torch.Tensor
    weight: torch.Tensor | None = None  # quantized

    def compare(self, twin):
        if self.weight is None:
            return difference(self.values, twin.values)
        return difference(self.values, rounded_like(twin.values, self.weight))


def multiplied(model, layer):
    """The steps of a forward, which gathers and flushes."""
    modules = [module for module in model.modules() if hasattr(module, "unshard")]
    for module in modules:
        module.unshard()
    weight = model.layers[layer].weight.detach()
    if is_quantized(weight):
        one = torch.ones(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
        torch.nn.functional.linear(one, weight)
        result = Multiplied(ops.dequantize(weight).clone(), weight)
    else:
        result = Multiplied(plain_value(weight).clone())
    for module in modules:
        module.reshard()
    return result


def draw_load_other(d):
    layer = draw_layer(d, needs_address=True)  # without a master a twin does not know what is rounded
    if layer is None or d.setup.offload:
        return None
    return {
        "seed": d.rng.randrange(1000),
        "how": "built" if d.setup.sharded else d.choice(OTHERS),
        "copies": d.chance(0.5),
        "reads": d.chance(0.6),
        "number": d.number(),
        "by": d.choice(LOADS),
        "layer": layer,
        "into": d.new_checkpoint("dcp"),
    }


@step(1.5, draw_load_other)
@torch.no_grad()
def load_other_model(subject, seed, how, copies, reads, number, by, layer, into):
    """As a target network follows its online one: it takes the values, multiplies by them, and is
    loaded or averaged again once they have changed."""
    if not shows_shards(subject):
        return
    in_inference = how == "deep copy in inference mode"
    other = OTHERS[how](subject, seed)
    with torch.inference_mode(in_inference):
        if copies:
            for to, source in zip(other.parameters(), subject.params.values(), strict=True):
                local(to).data.copy_(local(source).data)
        shown = multiplied(other, layer) if reads else None
    yield shown
    for param in subject.params.values():
        local(param).detach().mul_(number)
    if subject.quantized:
        qshard.flush(subject.model)
    yield
    with torch.inference_mode(in_inference):
        LOADS[by](subject, other, into)
        shown = multiplied(other, layer)
    yield shown


@step(1.5, lambda d: {} if not d.setup.sharded else None, reads=True)
def deepcopy_model(subject):
    """And go on with the copy, whose optimizer is new."""
    subject.replace_model(copy.deepcopy(subject.model))
    subject.new_optimizer(subject.setup.optimizer)


@step(1, lambda d: {} if not d.setup.sharded else None, reads=True)
def pickle_model_state(subject):
    """Into the same model, assigned."""
    file = io.BytesIO()
    torch.save(subject.model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    for name, value in state.items():
        if subject.quantized and name.endswith("weight"):
            layer = subject.setup.layers[int(name.split(".")[1])]
            is_codes = bool(layer.format) and not layer.keep_master  # masters are saved plain
            assert is_quantized(value) == is_codes, f"{name} was pickled as another kind"
    subject.model.load_state_dict(state, assign=True)
    subject.params.clear()
    subject.refresh()
    subject.new_optimizer(subject.setup.optimizer)


@step(0.7, lambda d: {"through": d.choice(("state_dict", "dcp"))})
def resume_optimizer(subject, through):
    """Optimizer states through a checkpoint, into a new optimizer of the same kind."""
    old, kind = subject.optimizer, type(subject.optimizer)
    if through == "state_dict":
        state = copy.deepcopy(old.state_dict())
        subject.optimizer = kind(list(subject.params.values()))
        subject.optimizer.load_state_dict(state)
        return
    for module in subject.fsdp_modules():
        module.reshard()
    # Each makes optimizers without states step once, with gradients of 0.
    before = histories(subject)
    state = copy.deepcopy(get_optimizer_state_dict(subject.model, old))
    yield moved_histories(subject, before)
    subject.optimizer = kind(list(subject.params.values()))
    set_optimizer_state_dict(subject.model, subject.optimizer, state)
    yield moved_histories(subject, before)


def histories(subject):
    """What quantized weights remember of optimizer steps."""
    if not subject.quantized:
        return {}
    weights = {n: local(p).detach() for n, p in subject.params.items() if is_quantized(local(p))}
    states = {n: state_of(w) for n, w in weights.items()}
    return {n: state["amax_history"] for n, state in states.items() if "amax_history" in state}


def with_agreement(before, now):
    """State dicts have ranks agree on what activations had since the last step, of which one may lack the largest."""
    before = before.clone()
    before[-2:, 0] = before[-2:, 0].maximum(now[-2:, 0])
    return before


def moved_histories(subject, before):
    now = histories(subject)
    moved = [name for name in before if not torch.equal(with_agreement(before[name], now[name]), now[name])]
    return f"a made-up step moved the history of {moved}" if moved else None
