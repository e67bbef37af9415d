"""What train_fsdp.py reports: its configurations, their results, and the tables with goals."""

import argparse
from dataclasses import dataclass, field, replace
from statistics import median

import one_rank_group
import torch.distributed as dist
from measuring import Profile, Row, at_most, describe, environment, table
from peers import COUNTERPARTS, PEERS, TE, versions

import qshard
from qshard.formats import info_of

PLAIN = "bf16"
RECIPES = {
    recipe.format: recipe
    for recipe in (
        qshard.Float8CurrentScaling(),
        qshard.DelayedScaling(),
        qshard.Float8RowwiseScaling(),
        qshard.Float8BlockScaling(),
        qshard.Float8BlockScaling(x_block_scaling_dim=1),
        qshard.MXFP8BlockScaling(),
        qshard.NVFP4BlockScaling(),
    )
}


@dataclass(frozen=True)
class Configuration:
    format: str
    compiled: bool = False
    checkpointed: bool = False
    no_master: bool = False
    fsdp1: bool = False
    fused: bool = False  # qshard.fuse_
    modules: bool = False  # blocks of qshard.nn.TransformerLayer
    stock: bool = False  # under tensor parallelism: torch's styles
    watched: bool = False  # qshard.watch
    complex: bool = False  # rotary embeddings by complex numbers
    plain_loss: bool = False  # not compiled
    clipped: bool = False  # torch.nn.utils.clip_grad_norm_
    folded: bool = False  # qshard.clip_grad_norm_
    grouped: bool = False  # embedding and head are FSDP2 groups of their own
    kept: bool = False  # reshard_after_forward=False
    selective: bool = False  # selective activation checkpointing, as torchtitan's
    head: bool = False  # quantized, in one step with the loss
    head_backward: bool = False  # plain, in such a step, whose backward multiplies codes
    fp8_weights: bool = False  # TransformerEngine's parameters are FP8
    reduced: str = ""  # the format gradients are reduced in, if not as they are

    @classmethod
    def parse(cls, text: str) -> "Configuration":
        format, *options = text.split(":")
        reduced = [o for o in options if o.removeprefix("reduced_") in ("float8", "mxfp8", "nvfp4")]
        flags = set(options) - set(reduced)
        unknown = flags - {name for name, value in vars(cls(PLAIN)).items() if value is False}
        if unknown or len(reduced) > 1 or format not in (PLAIN, *RECIPES, *PEERS):
            wrong = ", ".join(sorted(unknown) or reduced[1:]) or format
            raise argparse.ArgumentTypeError(f"{text}: unknown {wrong}")
        if "fsdp1" in flags and (reduced or "no_master" in flags or format in PEERS):
            raise argparse.ArgumentTypeError(f"{text}: fsdp1 goes with bf16 and formats alone, "
                                             "compiled and checkpointed")
        if "watched" in flags and ("fsdp1" in flags or format not in RECIPES):
            raise argparse.ArgumentTypeError(f"{text}: watched are quantized weights, under FSDP2 or --tp")
        if "modules" in flags and ("fsdp1" in flags or format in PEERS):
            raise argparse.ArgumentTypeError(f"{text}: modules are ours, under FSDP2 or --tp")
        edges = {"complex", "plain_loss", "clipped", "folded", "grouped", "kept", "selective"}
        if flags & edges and flags & {"modules", "fsdp1"}:
            raise argparse.ArgumentTypeError(f"{text}: {', '.join(sorted(flags & edges))} are for a model of "
                                             "stock modules under FSDP2")
        if flags & {"head", "head_backward"} and (format not in RECIPES or "fsdp1" in flags):
            raise argparse.ArgumentTypeError(f"{text}: a head in one step with the loss is ours, under FSDP2")
        if format in TE and (reduced or flags - {"compiled", "fp8_weights"}):
            raise argparse.ArgumentTypeError(f"{text}: {format} goes with compiled and fp8_weights alone")
        if "fp8_weights" in flags and format not in TE:
            raise argparse.ArgumentTypeError(f"{text}: fp8_weights are TransformerEngine's")
        return cls(format, **dict.fromkeys(flags, True),
                   reduced="".join(reduced).removeprefix("reduced_"))

    @property
    def has_coded_head(self) -> bool:
        return self.head or self.head_backward

    def with_plain_reduction(self) -> "Configuration":
        return replace(self, reduced="")

    def of_plain_weights(self) -> "Configuration":
        """bf16 of the same options, of stock modules; torch's styles are its only ones."""
        return replace(self, format=PLAIN, reduced="", fused=False, modules=False, stock=False, watched=False,
                       clipped=self.clipped or self.folded, folded=False, fp8_weights=False,
                       head=False, head_backward=False)

    def peers(self) -> "list[Configuration]":
        """Those of other libraries with the same options. TransformerEngine has its own blocks, whatever ours are."""
        of_te = replace(self, fused=False, modules=False)
        found = [replace(of_te if name in TE else self, format=name)
                 for name in COUNTERPARTS.get(self.format, ())]
        return found + [replace(c, fp8_weights=True) for c in found if c.format in TE]

    def __str__(self) -> str:
        options = [name for name, value in vars(self).items() if value is True]
        return ":".join([self.format, *options, *([f"reduced_{self.reduced}"] if self.reduced else [])])


@dataclass
class Result:
    """What one configuration measured on rank 0."""

    step_ms: float
    tokens_per_second: float
    init_gb: float
    steady_gb: float
    arithmetic_gb: float
    peak_gb: float
    gathered_mb: float  # per layer
    activations_mb: float  # gathered over tensor parallelism in a step
    losses: list[float]
    profile: Profile | None
    watched_ms: float = 0  # mean of a step, those that are sampled among them


@dataclass
class HostTimes:
    pre_forward_us: list[float] = field(default_factory=list)
    forward_backward_ms: list[float] = field(default_factory=list)
    optimizer_ms: list[float] = field(default_factory=list)


def goals(configuration: Configuration, is_tiny: bool, layout: dict[str, int]) -> dict[str, float]:
    """Bounds, for the slice of the model on 2, 4 or 8 GPUs: steps and activations gathered relative to
    bf16, GB absolute."""
    ranks, tp = layout["ranks"], layout["tp"]
    if is_tiny or configuration.reduced or configuration.format in (PLAIN, *PEERS):
        return {}
    if tp > 1:
        per_tensor = 0.75 if ranks == tp else 0.65
        step = {"float8_tensorwise": per_tensor, "float8_blockwise": 0.82}.get(configuration.format)
        if step is None or configuration.stock or configuration.no_master:
            return {}
        # Half of the bytes of eight layers' four gathers, and all of the head's and the embedding's.
        return {"step": step, "activations": (8 * 4 * 0.502 + 2) / (8 * 4 + 2)}
    if configuration.no_master:
        return {"step": 1.0, "steady": 5.2} if ranks == 2 else {"step": 1.0}
    if configuration.fsdp1:
        is_sent_as_codes = configuration.format in ("float8_tensorwise", "float8_blockwise")
        return {"step": 0.78} if is_sent_as_codes and not configuration.checkpointed else {}
    compiled, is_fused = configuration.compiled, configuration.fused or configuration.modules
    bounds = {"float8_tensorwise": (0.69, 0.70), "float8_blockwise": (0.74, 0.75)}
    peaks = 24.5, 21.5
    if is_fused:
        bounds = {"float8_tensorwise": (0.67, 0.69), "float8_blockwise": (0.71, 0.73)}
        if ranks >= 4:
            bounds = {"float8_tensorwise": (0.65, 0.67), "float8_blockwise": (0.69, 0.72)}
        peaks = 23.0, 21.5
    if configuration.format not in bounds or configuration.checkpointed:
        return {}
    step = 0.68 if ranks >= 8 and not is_fused else bounds[configuration.format][compiled]
    return {"step": step, "peak": peaks[compiled]} if ranks == 2 else {"step": step}


def is_ours_on_fsdp2(configuration: Configuration) -> bool:
    return configuration.format not in PEERS and not configuration.fsdp1


def comparisons(results, host, is_tiny: bool, layout: dict[str, int]) -> list[Row]:
    """Each configuration against bf16 and its peers of the same options, or a bound in GB."""
    rows = []

    def compare(configuration, what, measured, reference, unit, bound=None):
        goal = None if bound is None else at_most(bound)
        rows.append(Row(str(configuration), what, measured, reference or None, unit, goal))

    for c, result in results.items():
        bounds = goals(c, is_tiny, layout)
        plain = results.get(c.of_plain_weights(), result)
        if plain is not result:
            compare(c, "step", result.step_ms, plain.step_ms, "ms", bounds.get("step"))
            compare(c, "all-gather of a layer", result.gathered_mb, plain.gathered_mb, "MB",
                    0.502 if c.format in RECIPES and info_of(c.format).scale.place == "grid" else None)
            if layout["tp"] > 1:
                compare(c, "activations gathered", result.activations_mb, plain.activations_mb, "MB",
                        bounds.get("activations"))
            if layout["ranks"] > 2 or layout["tp"] > 1:
                compare(c, "peak", result.peak_gb, plain.peak_gb, "GB")
        for peer in filter(results.get, c.peers()):
            compare(c, f"step, of {peer}'s", result.step_ms, results[peer].step_ms, "ms")
            compare(c, f"peak, of {peer}'s", result.peak_gb, results[peer].peak_gb, "GB")
        if result.watched_ms:
            compare(c, "step, some sampled", result.watched_ms, result.step_ms, "ms", None if is_tiny else 1.02)
        compare(c, "steady / arithmetic", result.steady_gb, result.arithmetic_gb, "GB",
                None if c.format in PEERS else 1.02)
        for what, measured in (("steady", result.steady_gb), ("peak", result.peak_gb)):
            if what in bounds:
                compare(c, f"{what} / goal", measured, bounds[what], "GB", 1)
    for c, times in host.items():
        plain = host.get(c.of_plain_weights(), times)
        has_goals = is_ours_on_fsdp2(c)
        if plain is not times:
            compare(c, "host, pre_forward of a block", median(times.pre_forward_us),
                    median(plain.pre_forward_us), "µs", 1.0 if has_goals else None)
            compare(c, "host, forward and backward", median(times.forward_backward_ms),
                    median(plain.forward_backward_ms), "ms")
            compare(c, "host, optimizer.step()", median(times.optimizer_ms),
                    median(plain.optimizer_ms), "ms", 1.15 if has_goals else None)
    return rows


def mean_of_watched(intervals: list[float], first: int, every: int) -> float:
    """Mean ms of steps from number `first` on, `every` of which one is sampled: by medians of its kinds. The end of
    the step before a sampled one counts what its weights lose."""
    others, sampled, before = [], [], []
    for step, ms in enumerate(intervals, first):
        kind = {0: sampled, every - 1: before}.get(step % every, others)
        kind.append(ms)
    if not others or not sampled or not before:
        raise ValueError(f"--steps: none of {len(intervals)} steps is sampled, or all are, at --watch {every}")
    return median(others) + (median(sampled) + median(before) - 2 * median(others)) / every


def spread(times: list[float]) -> str:
    return f"{median(times):.4g} ({min(times):.4g})"


def overview(results: dict[Configuration, Result]) -> str:
    header = ["", "step ms", "tokens/s", "init GB", "steady", "peak", "gather MB", "activations MB", "kernels",
              "NCCL", "span ms", "idle", "gaps", "loss 1", "5", "10", "last 10"]
    rows = []
    for configuration, r in results.items():
        memory = [f"{gb:.2f}" for gb in (r.init_gb, r.steady_gb, r.peak_gb)]
        p = r.profile
        counts = [p.kernels, p.nccl_kernels, f"{p.span_ms:.2f}", f"{p.span_ms - p.busy_ms:.2f}",
                  p.gaps] if p else [""] * 5
        # One step's text decides as much as one step's training: the last is a mean.
        losses = [f"{sum(loss) / len(loss):.4f}" if loss else "" for loss in (
            r.losses[:1], r.losses[4:5], r.losses[9:10], r.losses[-10:])]
        rows.append([configuration, f"{r.step_ms:.2f}", f"{r.tokens_per_second:,.0f}", *memory,
                     f"{r.gathered_mb:.1f}", f"{r.activations_mb:.1f}", *counts, *losses])
    return table(header, rows)


def host_overview(host: dict[Configuration, HostTimes]) -> str:
    header = ["host, median (minimum)", "pre_forward µs", "forward, backward ms", "optimizer.step() ms"]
    rows = [[c, *map(spread, (t.pre_forward_us, t.forward_backward_ms, t.optimizer_ms))]
            for c, t in host.items()]
    return table(header, rows)


def breakdown(results: dict[Configuration, Result]) -> str:
    """ms of device time of one step by kind of kernel; streams overlap, so they add up to more."""
    profiles = {str(c): r.profile for c, r in results.items() if r.profile}
    kinds = sorted({kind for p in profiles.values() for kind in p.ms},
                   key=lambda kind: -max(p.ms.get(kind, 0) for p in profiles.values()))
    rows = [[kind, *(f"{p.ms.get(kind, 0):.2f}" for p in profiles.values())] for kind in kinds]
    return table(["ms of device time", *profiles], rows)


def attention(results: dict[Configuration, Result]) -> str:
    """Which kernels attention ran; configurations that differ are not comparable."""
    ran = {}
    for configuration, result in results.items():
        if result.profile:
            ran.setdefault(", ".join(result.profile.attention), []).append(str(configuration))
    return "\n".join(f"attention of {', '.join(who)}: {kernels}" for kernels, who in ran.items())


def show(results, host, layout: dict[str, int], is_tiny: bool, with_breakdown: bool):
    alone = " of which one runs" if dist.get_backend() == one_rank_group.BACKEND else ""
    parts_of_layout = [f"{name} {layout[name]}" for name in ("tp", "replicas") if layout[name] > 1]
    where = ", ".join([f"{layout['ranks']} ranks{alone}", *parts_of_layout, describe(environment()), *(
        f"{name} {version}" for name, version in versions().items())])
    parts = [f"qshard training: {where}", overview(results)]
    if with_breakdown:
        parts.append(breakdown(results))
    rows = [row.cells() for row in comparisons(results, host, is_tiny, layout)]
    parts += [attention(results), host_overview(host), table(Row.HEADER, rows)]
    print("\n" + "\n\n".join(parts), flush=True)


def record(results, host) -> dict[str, object]:
    """For JSON."""
    def fields(value):
        return None if value is None else vars(value)

    return {
        str(c): {**vars(r), "profile": fields(r.profile), "host": fields(host.get(c))}
        for c, r in results.items()
    }
