"""Arguments of TransformerEngine's modules: what is not there is refused by its name."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

PARALLEL_MODES = (None, "column", "row")
NORMALIZATIONS = ("LayerNorm", "RMSNorm")
UNSUPPORTED = (  # by constructors
    "delay_wgrad_compute",
    "symmetric_ar_type",
    "ub_bulk_dgrad",
    "ub_bulk_wgrad",
    "ub_overlap_ag",
    "ub_overlap_rs",
    "ub_overlap_rs_dgrad",
)


def refuse(module: str, **arguments) -> None:
    """Raises for an argument that asks for something: is neither None nor False."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(
                f"qshard.nn.{module}: {name}={value!r} is not supported; leave it at its default"
            )


def refuse_arguments(module: str, given: dict) -> None:
    """The same of what a constructor was given, its locals()."""
    refuse(module, **{name: given[name] for name in UNSUPPORTED if name in given})


def refuse_context_parallelism(module: str, cp_group=None) -> None:
    """Over one rank nothing of it matters. cp_group: a group, or one for each level."""
    for group in cp_group if isinstance(cp_group, (list, tuple)) else [cp_group]:
        size = 1 if group is None else dist.get_world_size(group)
        if size != 1:
            raise NotImplementedError(
                f"qshard.nn.{module}: cp_group of {size} ranks is not supported; leave it out"
            )


def check_choice(module: str, name: str, value, choices) -> None:
    if value not in choices:
        raise ValueError(
            f"qshard.nn.{module}: {name}={value!r} is none of {', '.join(map(repr, choices))}"
        )


def split_sizes(module: str, parameters_split, out_features: int) -> dict[str, int]:
    """The rows of each part, by the prefix of its parameters' names: "" of an undivided one."""
    if parameters_split is None:
        return {"": out_features}
    if not parameters_split:
        raise ValueError(f"qshard.nn.{module}: parameters_split names no parameter")
    if not isinstance(parameters_split, dict):
        if not all(isinstance(name, str) for name in parameters_split):
            raise TypeError(
                f"qshard.nn.{module}: parameters_split takes names, or sizes by name, not "
                f"{parameters_split!r}"
            )
        size = out_features // len(parameters_split)
        parameters_split = dict.fromkeys(parameters_split, size)
    sizes = {f"{name.rstrip('_')}_": size for name, size in parameters_split.items()}
    if sum(sizes.values()) != out_features:
        raise ValueError(
            f"qshard.nn.{module}: parameters_split of {list(sizes.values())} rows does not sum to "
            f"out_features={out_features}"
        )
    return sizes


@dataclass(frozen=True)
class RngFork:
    """Puts random numbers onto the generator of a tracker: a context, when called."""

    get_rng_state_tracker: Callable
    name: str | None = None

    def __call__(self):
        return self.get_rng_state_tracker().fork(*([self.name] if self.name else []))

    def contexts(self):
        """context_fn of torch's checkpoint, which knows of the default generators alone: what is computed
        again draws from the tracker's states of the first time."""
        tracker = self.get_rng_state_tracker()
        if not (hasattr(tracker, "get_states") and hasattr(tracker, "set_states")):
            raise TypeError(
                f"qshard.nn: the tracker of get_rng_state_tracker, a {type(tracker).__name__}, has no "
                "get_states() and set_states(), by which a checkpoint drops the same again; compute without "
                "checkpoint, or give one that has"
            )
        return nullcontext(), _WithStates(tracker, _copied(tracker.get_states()))


class _WithStates:
    """A context in which a tracker has the given states. Entered once for each backward of a graph."""

    def __init__(self, tracker, states):
        self.tracker, self.states = tracker, states

    def __enter__(self):
        self.later = self.tracker.get_states()
        self.tracker.set_states(_copied(self.states))

    def __exit__(self, *_):
        self.tracker.set_states(self.later)


def _copied(states):
    """A tracker writes into its dict, and into states that are generators."""
    return {n: s.clone_state() if isinstance(s, torch.Generator) else s for n, s in states.items()}


def rng_fork(get_rng_state_tracker: Callable | None, name: str | None = None) -> RngFork | None:
    return None if get_rng_state_tracker is None else RngFork(get_rng_state_tracker, name)
