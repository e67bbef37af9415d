"""The time of a training step, from measured constants alone.

A GPU has rates, each derived from one recorded profile of the slice of Llama 8B (bench/results/constants.json): FLOP/s
of GEMMs by format and of attention, seconds per token and column of the other kernels, and seconds per parameter of
FSDP2's copies. Formats whose GEMMs are dequantized have their recorded ratio to bf16. AdamW moves its bytes at its share of
the copy bandwidth. Collectives move a ring's bytes at the rate of their link, and begin with its latency.

A step is FSDP2's order of events. One queue serves the collectives of the ranks that share a model. A layer's gather
waits until the one before it was copied out. A layer's backward waits for its gather and for the reduce-scatter of the
layer above the one before. A gradient's all-reduce between replicas has a queue of its own. Collectives of tensor
parallelism hide behind nothing, nor do those of experts; where experts lie on several nodes they take their turn in the
queue. AdamW, and the all-reduce of its flush, follow the backward. The model knows no wait for the host, no slower rank,
and no memory that activations take.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from local_bytes import divided, grid_bytes, row_bytes
from model_shapes import SEQUENCE, SLICE, Shape

from qshard.formats import info_of

DATA = Path(__file__).resolve().parents[1] / "results" / "constants.json"
RECORD = json.loads(DATA.read_text())
CONSTANTS = {constant["name"]: constant["value"] for constant in RECORD["constants"]}
PLAIN, BF16 = "bf16", 2
SLICE_TOKENS, SLICE_RANKS = 8192, 2  # the profiles have so many tokens on a GPU, and so many ranks
NODE = 8  # GPUs that NVLink joins
ADAMW = 28  # bytes of a step of fused AdamW on an fp32 parameter: gradient, value and two moments
# Bytes that an element of a token takes in a gather of tensor parallelism (docs/tensor-parallelism.md).
TOKENS_GATHERED = {"float8_tensorwise": 1, "float8_delayed": 1, "float8_blockwise": 1.03, "mxfp8": 1.03}


def format_of(configuration: str) -> str:
    return configuration.split(":")[0]


def weight_bytes(format: str, columns: int) -> float:
    """An element's part of a row, as FSDP2 gathers it."""
    return BF16 if format == PLAIN else row_bytes(format, columns) / columns


@dataclass(frozen=True)
class Gpu:
    name: str

    def recorded(self, configuration: str, kind: str) -> float:
        """ms of one step of the slice."""
        return CONSTANTS.get(f"{self.name}/{configuration}/{kind}", 0.0)

    @cached_property
    def copy(self) -> float:
        """Bytes a second."""
        return CONSTANTS[f"{self.name}/copy_gb_per_s"] * 1e9

    @cached_property
    def nvlink(self) -> float:
        """Bytes a second that a rank sends. NCCL's kernels wait for the other rank, too, so that this is a lower bound."""
        sent = CONSTANTS["nccl_weights_mb"] + CONSTANTS["nccl_gradients_mb"]
        return sent * 1e6 / (CONSTANTS[f"{self.name}/nccl_ms"] * 1e-3)

    def has(self, configuration: str) -> bool:
        return f"{self.name}/{configuration}/gemm" in CONSTANTS or f"step_of_bf16/{configuration}" in CONSTANTS

    def of_bf16(self, configuration: str) -> float:
        """1, or how much longer a step of a format takes whose GEMMs are dequantized."""
        return CONSTANTS.get(f"step_of_bf16/{configuration}", 1.0)

    def flops(self, configuration: str) -> float:
        """FLOP a second of the linears of layers; the head is bf16's in every configuration."""
        of_layers = 6 * SLICE.layers * SLICE.dense * SLICE_TOKENS
        of_head = 6 * SLICE.root / 2 * SLICE_TOKENS
        plain = (of_layers + of_head) / self.recorded(PLAIN, "gemm")
        if configuration == PLAIN:
            return plain * 1e3
        return of_layers / (self.recorded(configuration, "gemm") - of_head / plain) * 1e3

    def attention(self, configuration: str) -> float:
        """Seconds of a layer for a token, a position and a column."""
        size = SLICE.layers * SLICE_TOKENS * SEQUENCE * SLICE.attention
        return self.recorded(configuration, "attention") * 1e-3 / size

    def others(self, configuration: str) -> float:
        """Seconds of a layer for a token and a column: norms, rotary embeddings, quantization and what else is no GEMM."""
        ms = sum(self.recorded(configuration, kind) for kind in ("elementwise", "quantize", "other"))
        if configuration != PLAIN:  # whose kernel of AdamW counts as other
            elements = SLICE.layers * SLICE.dense / SLICE_RANKS
            ms -= elements * self.optimizer(format_of(configuration)) * 1e3
        return ms * 1e-3 / (SLICE.layers * SLICE_TOKENS * (SLICE.dim + SLICE.width))

    def copies(self, configuration: str) -> float:
        """Seconds for a parameter: into and out of the buffers of FSDP2's collectives."""
        return self.recorded(configuration, "copies") * 1e-3 / SLICE.numel

    def optimizer(self, format: str) -> float:
        """Seconds for a parameter that the rank has."""
        codes = 0 if format == PLAIN else info_of(format).code_bits / 8
        return (ADAMW + codes) / (CONSTANTS[f"adamw_share/{format}"] * self.copy)

    def experts(self, format: str) -> float:
        """FLOP a second of experts' linears as a whole, forward and backward."""
        us = sum(CONSTANTS[f"experts/{format}/{name}_us"] for name in ("up", "down"))
        return 6 * 8 * 4096 * (4096 * 7168 + 7168 * 2048) / us * 1e6


@dataclass(frozen=True)
class Job:
    """A model on a mesh of replicas x shards x tensor- or expert-parallel ranks."""

    shape: Shape
    configuration: str  # bf16, or a format, or format:fused
    shards: int
    link: float  # bytes a second between nodes
    gpu: Gpu
    replicas: int = 1
    tensor: int = 1
    expert: int = 1  # ranks that share out the experts; they are data-parallel for all else
    tokens: int = 8192  # that a GPU has in a step
    gradients: str = PLAIN  # in which they travel
    latency: float = 0.0  # seconds of a collective
    gathers_codes: bool = True  # else the weights travel in bf16, whatever multiplies them
    links_inside: float = 0.0  # bytes a second within a node, for tensor parallelism and HSDP; 0: the GPU's NVLink

    @property
    def format(self) -> str:
        return format_of(self.configuration)

    @property
    def gpus(self) -> int:
        return self.replicas * self.shards * self.tensor

    @property
    def inside(self) -> float:
        return self.links_inside or self.gpu.nvlink

    # ------------------------------------------------------------------------------- bytes

    def _on_the_wire(self, weights, in_codes: bool) -> float:
        format = self.format if in_codes and self.gathers_codes else PLAIN
        return sum(weight.numel * weight_bytes(format, weight.columns) for weight in weights)

    @cached_property
    def gathered_of_layer(self) -> float:
        """Bytes of a layer that its ranks have after a gather."""
        return self._on_the_wire(self.shape.weights, True) / self.tensor

    @cached_property
    def gathered_of_experts(self) -> float:
        return self._on_the_wire(self.shape.experts, True) / self.expert

    @property
    def state_bytes(self) -> float:
        """Bytes between steps on a rank: codes and scales, master, both moments."""
        ranks = self.shards * self.tensor  # those of experts are among them
        total = self.shape.root * 12 / ranks
        for weight in (*self.shape.weights, *self.shape.experts):
            codes = 0 if self.format == PLAIN else weight_bytes(self.format, weight.columns)
            total += self.shape.layers * weight.numel * (12 + codes) / ranks
            if self.format != PLAIN:
                one = grid_bytes(self.format, weight.rows, weight.columns) * max(weight.matrices, 1)
                total += self.shape.layers * one / (self.expert if weight.matrices else self.tensor)
        return total

    @property
    def unsharded_bytes(self) -> float:
        """Beside them within a step: two gathered layers, the gradient of one in bf16 and fp32, and the root."""
        layer = self.gathered_of_layer + self.gathered_of_experts
        elements = self.shape.dense / self.tensor + self.shape.of_experts / self.expert
        return 2 * layer + 6 * elements + BF16 * self.shape.root / self.tensor

    @property
    def flush_bytes(self) -> float:
        """What the flush of a step reduces: a word for each scale that spans rows, and for each block that a cut between
        ranks splits. The blocks of rows of one weight are as find_boundary_blocks has them."""
        if self.format == PLAIN:
            return 0
        words = 0
        for weight in self.shape.weights:
            words += self._words(weight.cut_in_rows(self.tensor)) * self.shape.layers
        for stack in self.shape.experts:
            part = stack.of_experts(self.expert)
            words += part.matrices * grid_bytes(self.format, part.rows, part.columns) / 4 * self.shape.layers
        return 4 * words

    def _words(self, weight) -> float:
        level = info_of(self.format).scale
        words = grid_bytes(self.format, weight.rows, weight.columns) / 4
        if level.place == "rows":
            chunk = weight.padded_rows(self.shards)
            cuts = {row // level.block_rows for row in range(chunk, weight.rows, chunk) if row % level.block_rows}
            words += len(cuts) * divided(weight.columns, level.block_cols)
        return words

    # -------------------------------------------------------------------------------- times

    def _ring(self, size: float, ranks: int, link: float) -> float:
        """Seconds of an all-gather or a reduce-scatter of `size` bytes."""
        return size * (ranks - 1) / ranks / link + self.latency if ranks > 1 else 0.0

    @property
    def _shard_link(self) -> float:
        """A ring is as fast as its slowest link."""
        inside = self.shards * self.tensor <= NODE and self.replicas > 1
        return self.inside if inside else self.link

    def _gather(self, size: float, experts: float = 0.0) -> float:
        time = self._ring(size, self.shards, self._shard_link)
        return time + (self._ring(experts, max(self.shards // self.expert, 1), self._shard_link) if experts else 0)

    @property
    def _reduced(self) -> float:
        """Bytes of a gradient's element."""
        return BF16 * CONSTANTS[f"reduced_mb/{self.gradients}"] / CONSTANTS[f"reduced_mb/{PLAIN}"]

    @cached_property
    def _layer_time(self) -> float:
        """Seconds of a layer's kernels, forward and backward."""
        gpu, shape, configuration = self.gpu, self.shape, self.configuration
        ratio = gpu.of_bf16(self.format)
        if ratio != 1:
            configuration = PLAIN
        elements = shape.dense / self.tensor + shape.of_experts / self.expert
        rows = self.tokens * self.tensor  # ranks of tensor parallelism share their tokens
        time = 6 * rows * shape.dense / self.tensor / gpu.flops(configuration)
        if shape.experts:
            time += 6 * self.tokens * (shape.used_by_a_token - shape.dense) / gpu.experts(self.format)
        time += gpu.attention(configuration) * self.tokens * SEQUENCE * shape.attention
        time += gpu.others(configuration) * self.tokens * (shape.dim + shape.width)
        return ratio * (time + gpu.copies(configuration) * elements)

    @cached_property
    def _tensor_parallel(self) -> float:
        """Seconds of a layer's gathers and reduce-scatters of tokens: two of each forward, as many backward."""
        element = TOKENS_GATHERED.get(self.format, BF16)
        size = self.tokens * self.tensor * self.shape.dim
        times = [self._ring(size * e, self.tensor, self.inside) for e in (element, BF16)]
        return 4 * sum(times)

    @cached_property
    def _all_to_all(self) -> float:
        """Seconds of a layer's way of tokens to experts and back, forward and backward, in bf16."""
        size = self.tokens * self.shape.chosen * self.shape.dim * BF16
        return 4 * self._ring(size, self.expert, self.inside if self.is_within_node else self.link)

    @property
    def is_within_node(self) -> bool:
        """Whether tokens on their way to experts leave the links between nodes alone."""
        return self.expert <= NODE

    @property
    def optimizer_seconds(self) -> float:
        ranks = self.shards * self.tensor
        root = self.shape.root / ranks * self.gpu.optimizer(PLAIN)
        return root + (self.shape.numel - self.shape.root) / ranks * self.gpu.optimizer(self.format)

    @property
    def flush_seconds(self) -> float:
        if not self.flush_bytes or self.shards == 1:
            return 0.0
        return 2 * self._ring(self.flush_bytes, self.shards, self._shard_link)

    def host_ms(self) -> float:
        """The host's part of FSDP2's unshard and reshard, twice a step."""
        weights = self.shape.layers * (len(self.shape.weights) + len(self.shape.experts))
        return 2 * weights * CONSTANTS["host_us/bf16" if self.format == PLAIN else "host_us/quantized"] * 1e-3

    def step(self, has_collectives_of_layers: bool = True) -> "Step":
        return timeline(self, has_collectives_of_layers)


@dataclass(frozen=True)
class Step:
    seconds: float
    kernels: float  # seconds in which a kernel runs that is no collective
    flush: float

    @property
    def exposed(self) -> float:
        """Seconds in which collectives run, but for the flush's, and no kernel."""
        return max(self.seconds - self.kernels - self.flush, 0.0)


class Queue:
    """Collectives run in the order in which they are asked for."""

    def __init__(self):
        self.free = 0.0

    def run(self, after: float, seconds: float) -> float:
        self.free = max(self.free, after) + seconds
        return self.free


def timeline(job: Job, has_collectives_of_layers: bool) -> Step:
    """Without collectives of layers, those of the root, tensor parallelism and experts are left."""
    shape, layers = job.shape, job.shape.layers
    gather = reduce = between = 0.0
    if has_collectives_of_layers:
        gather = job._gather(job.gathered_of_layer, job.gathered_of_experts)
        elements = shape.dense / job.tensor, shape.of_experts / job.expert
        reduce = job._gather(*(size * job._reduced for size in elements))
        between = 2 * job._ring(BF16 * elements[0] / job.shards, job.replicas, job.link)
    root_gather = job._gather(BF16 * shape.root / job.tensor)
    root_reduce = job._gather(job._reduced * shape.root / job.tensor)
    root_between = 2 * job._ring(BF16 * shape.root / job.tensor / job.shards, job.replicas, job.link)
    inner = job._tensor_parallel + (job._all_to_all if job.is_within_node else 0.0)
    queued = 0.0 if job.is_within_node else job._all_to_all
    forward, backward = (job._layer_time + inner) / 3, (job._layer_time + inner) * 2 / 3
    head = 6 * job.tokens * shape.root / 2 / job.gpu.flops(PLAIN) + job.gpu.copies(PLAIN) * shape.root / job.tensor

    shard, replica = Queue(), Queue()

    def layer(start: float, kernels: float) -> float:
        """Its end. Tokens go to experts and back halfway through."""
        return shard.run(start + kernels / 2, queued / 2) + kernels / 2 if queued else start + kernels

    now = shard.run(0.0, root_gather)
    gathered = shard.run(now, gather)
    for i in range(layers):
        copied = max(now, gathered)  # where the next gather may write
        if i + 1 < layers:
            gathered = shard.run(copied, gather)
        now = layer(copied, forward)
    now += head / 3
    now = max(now, shard.run(now, root_gather)) + head * 2 / 3
    gathered, reduced = shard.run(now, gather), 0.0
    for i in range(layers):
        copied = max(now, gathered)
        if i + 1 < layers:
            gathered = shard.run(copied, gather)
        now = max(layer(copied, backward), reduced)  # the buffer of the reduce-scatter before is free
        reduced = shard.run(now, reduce)
        if between:
            replica.run(reduced, between)
    reduced = shard.run(now, root_reduce)
    if root_between:
        replica.run(reduced, root_between)
    end = max(now, reduced, replica.free)
    seconds = end + job.optimizer_seconds + job.flush_seconds
    kernels = layers * job._layer_time + head + job.optimizer_seconds
    return Step(seconds, kernels, job.flush_seconds)
