"""What the benchmarks share: device times of kernels, one training step as the profiler sees it, tables with
goals, a record of the run."""

import json
import math
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median

# Read when the profiler starts: without a GPU it would report that it found none.
os.environ.setdefault("KINETO_LOG_LEVEL", "5")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from tabulate import tabulate  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # kinds of events in a trace


# ----------------------------------------------------------------------------- device times


@dataclass(frozen=True)
class Kernel:
    """A kernel, copy or fill on the GPU. On CPU, where scripts only smoke-test themselves, an
    operator stands for its kernels."""

    name: str  # demangled
    us: float
    is_operator: bool = False
    start: float = 0.0  # µs

    @property
    def function(self) -> str:
        """Its name without return type, namespaces, template arguments and parameters."""
        name = self.name.removeprefix("void ").replace("(anonymous namespace)::", "")
        return re.split(r"[<(]", name, maxsplit=1)[0].rsplit("::", 1)[-1]

    @property
    def is_ours(self) -> bool:
        return "qshard::" in self.name.split("<", 1)[0]


def ours(word: str, but: str | None = None) -> Callable[[Kernel], bool]:
    """Selects qshard's kernels by a part of their function's name."""

    def select(kernel):
        named = word in kernel.function and (but is None or but not in kernel.function)
        return kernel.is_ours and (named or kernel.is_operator)

    return select


is_amax = ours("amax", but="quantize")
is_quantize = ours("quantize", but="dequantize")
is_dequantize = ours("dequantize")
is_transpose = ours("transpose")


def is_foreign(kernel: Kernel) -> bool:
    """Inside our operators: the GEMMs."""
    return not kernel.is_ours


def anything(kernel: Kernel) -> bool:
    return True


def synchronize():
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def trace(
    function: Callable[[], object], device: str, file: Path | None = None
) -> list[Kernel]:
    """What ran on the device while function() did, in order of start. file: for Chrome's trace of it."""
    cuda = device == "cuda"
    synchronize()
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as profiler:
        function()
        synchronize()
    events = events_of(profiler, file)
    kinds = ON_GPU if cuda else ("cpu_op",)
    found = sorted((e for e in events if e.get("cat") in kinds), key=lambda e: e["ts"])
    return [
        Kernel(e["name"], float(e.get("dur", 0)), is_operator=not cuda, start=float(e["ts"]))
        for e in found
    ]


def events_of(profiler, file: Path | None = None) -> list[dict]:
    """The events of a profile that has ended, as Chrome's format has them."""
    with tempfile.TemporaryDirectory() as folder:
        path = file or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text(errors="replace"), strict=False)["traceEvents"]


def interleaved(
    functions: list[Callable[[], object]], device: str, calls: int = 10
) -> list[list[list[Kernel]]]:
    """For each function, for each of its calls, the kernels that ran. The functions take turns.

    Before every call 256 MB are read, five times an H200's L2 cache, so that no call finds its
    operands there, nor lines that have yet to be written back. The kernel of `frac_`, which nothing
    else uses, stands before and after in the trace.
    """
    buffer = torch.zeros((256 << 20) // 4 if device == "cuda" else 16, device=device)
    mark = torch.zeros(16, device=device)

    def rounds(count):
        for _ in range(count):
            for function in functions:
                mark.frac_()
                buffer.sum()
                mark.frac_()
                function()

    rounds(3)
    found = []
    for kernel in trace(lambda: rounds(calls), device):
        if "frac_" in kernel.name:
            found.append([])
        elif found:
            found[-1].append(kernel)
    found = found[1::2]
    if len(found) != calls * len(functions):
        raise RuntimeError(f"{len(found)} calls in the trace instead of {calls * len(functions)}")
    return [found[i :: len(functions)] for i in range(len(functions))]


def time_of(calls: list[list[Kernel]], select: Callable[[Kernel], bool] = anything) -> float:
    """µs of the selected kernels of a call, median over the calls."""
    if not any(select(kernel) for call in calls for kernel in call):
        names = sorted({kernel.function for call in calls for kernel in call})
        raise LookupError(f"no such kernel among: {', '.join(names)}")
    return median(sum(kernel.us for kernel in call if select(kernel)) for call in calls)


def count_of(calls: list[list[Kernel]], select: Callable[[Kernel], bool] = anything) -> float:
    """Number of selected kernels of a call, median over the calls."""
    return median(sum(map(select, call)) for call in calls)


class Stopwatch:
    """Times between marks, in ms: on CUDA between events, without waiting for the device."""

    def __init__(self, device: str):
        self.cuda, self.marks = device == "cuda", []

    def mark(self):
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def intervals(self) -> list[float]:
        synchronize()
        pairs = zip(self.marks, self.marks[1:])
        return [a.elapsed_time(b) if self.cuda else (b - a) * 1e3 for a, b in pairs]


# ---------------------------------------------------------------------- one training step

# The first that matches a kernel's name decides.
KINDS = [
    ("NCCL", r"^nccl"),
    ("attention", r"attn|attention|flash|fmha|sdpa"),
    ("optimizer", r"FusedAdam"),
    ("GEMM", r"gemm|nvjet|cutlass|xmma|splitK|aten::mm|aten::addmm"),
    ("copies, of FSDP2 too", r"Memcpy|Memset|CopyFunctor|split_with_sizes|chunk_cat|CatArray"),
    ("embedding, loss", r"embedding|[Ee]mbed|softmax|SoftMax|nll_loss"),
    ("elementwise, norms, sums", r"elementwise|triton|reduce|norm|Norm|GammaBeta"),
]


ITEM_SIZES = {"unsigned char": 1, "c10::BFloat16": 2, "c10::Half": 2, "float": 4}


@dataclass
class Profile:
    kernels: int
    nccl_kernels: int
    ms: dict[str, float]  # device time by kind
    attention: list[str]  # functions, so that a switch of torch's kernel is seen
    span_ms: float  # from the first kernel to the end of the last
    busy_ms: float  # time within the span in which a kernel other than NCCL's ran
    gaps: int  # how many times no such kernel ran, because the GPU waited for NCCL or for the host


def kind_of(kernel: Kernel) -> str:
    if kernel.is_ours:
        for part in ("transpose", "amax", "dequantize", "quantize"):
            if part in kernel.function:
                return f"qshard {part}"
        return "qshard, other"
    return next((kind for kind, pattern in KINDS if re.search(pattern, kernel.name)), "other")


def busy_and_gaps(kernels: list[Kernel]) -> tuple[float, float, int]:
    """(span, busy, gaps) of `Profile`; kernels of all streams, in order of start."""
    others = [kernel for kernel in kernels if kind_of(kernel) != "NCCL"]
    busy, gaps, end = 0.0, 0, others[0].start
    for kernel in others:
        gaps += kernel.start > end
        busy += max(0.0, kernel.start + kernel.us - max(kernel.start, end))
        end = max(end, kernel.start + kernel.us)
    return (end - others[0].start) / 1e3, busy / 1e3, gaps


def profile_step(step, device: str, file: Path | None = None) -> Profile | None:
    """Profiles a step on rank 0; a collective call. file: for Chrome's trace."""
    if dist.get_rank() != 0:
        step()
        return None
    kernels = trace(step, device, file)
    ms, attention = Counter(), {}
    for kernel in kernels:
        kind = kind_of(kernel)
        ms[kind] += kernel.us / 1e3
        if kind == "attention":
            attention[kernel.function[:60]] = None
    nccl = sum(kind_of(kernel) == "NCCL" for kernel in kernels)
    return Profile(len(kernels), nccl, dict(ms), list(attention), *busy_and_gaps(kernels))


def gathered_activations(step) -> int:
    """Bytes that this rank has after the all-gathers of a step other than FSDP2's; a collective call.
    Those of one rank's group count nothing."""
    synchronize()
    # Shapes are the host's to note: of the device nothing is asked.
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, acc_events=True
    ) as profiler:
        step()
        synchronize()
    events = events_of(profiler)
    fsdp = [(e["tid"], e["ts"], e["ts"] + e["dur"]) for e in events
            if e.get("cat") == "user_annotation" and e["name"].startswith("FSDP::all_gather")]
    total = 0
    for event in events:
        if event.get("cat") != "cpu_op":
            continue
        tid, ts = event["tid"], event["ts"]
        if not any(tid == t and first <= ts <= last for t, first, last in fsdp):
            total += gathered_bytes(event["name"], event.get("args", {}))
    return total


def gathered_bytes(name: str, event: dict) -> int:
    """Bytes of what an operator gathers, from the shapes and types that the profiler noted."""
    if name == "c10d::_allgather_base_":  # (output, input, ...)
        output, given = map(math.prod, event["Input Dims"][:2])
        return output * ITEM_SIZES[event["Input type"][0]] if output > given else 0
    if name.startswith("_c10d_functional::all_gather_into_tensor"):  # (input, ranks, ...)
        ranks = int(event["Concrete Inputs"][1])
        size = math.prod(event["Input Dims"][0]) * ITEM_SIZES[event["Input type"][0]]
        return ranks * size if ranks > 1 else 0
    return 0


# ------------------------------------------------------------------------------------ tables


@dataclass(frozen=True)
class Goal:
    """A bound on measured / reference."""

    bound: float
    at_least: bool

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.bound:.3g}"

    def met(self, ratio: float) -> bool:
        return ratio >= self.bound if self.at_least else ratio <= self.bound


def at_least(bound: float) -> Goal:
    return Goal(bound, True)


def at_most(bound: float) -> Goal:
    return Goal(bound, False)


@dataclass(frozen=True)
class Row:
    """One line of a table; without a reference it only tells."""

    name: str
    shape: str
    measured: float
    reference: float | None
    unit: str
    goal: Goal | None = None

    HEADER = ("", "shape", "measured", "reference", "unit", "ratio", "goal", "met")

    @property
    def ratio(self) -> float:
        return self.measured / self.reference

    @property
    def is_met(self) -> bool:
        return self.goal is None or self.goal.met(self.ratio)

    def cells(self) -> list[str]:
        cells = [self.name, self.shape, number(self.measured)]
        if self.reference is None:
            return [*cells, "", self.unit, "", "", ""]
        goal = ["", ""] if self.goal is None else [str(self.goal), "yes" if self.is_met else "NO"]
        return [*cells, number(self.reference), self.unit, f"{self.ratio:.3f}", *goal]

    def record(self) -> dict[str, object]:
        """For JSON."""
        goal = None if self.goal is None else str(self.goal)
        return {**vars(self), "goal": goal, "met": self.is_met}


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Aligned columns, the first to the left."""
    header, rows = list(header), [list(map(str, row)) for row in rows]
    align = ["left"] + ["right"] * (len(header) - 1) if rows else None
    return tabulate(rows, headers=header, disable_numparse=True, colalign=align)


@dataclass
class Results:
    """Rows as they are measured. A row that raises costs one line and not the run, and past the
    deadline nothing more is begun."""

    title: str
    seconds: float
    rows: list[Row] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def add(self, name: str, measure: Callable[[], Iterable[Row]]):
        if time.monotonic() - self.started > self.seconds:
            print(f"SKIPPED {name}: {self.seconds:.0f} s are over", flush=True)
            return
        try:
            for row in measure():
                print("  ".join(filter(None, row.cells())), flush=True)
                self.rows.append(row)
        except Exception as error:
            print(f"FAILED {name}: {type(error).__name__}: {first_line(error)}", flush=True)

    def worst(self) -> list[Row]:
        """For each name, the row that is furthest from its goal, if any has one."""
        groups = {}
        for row in self.rows:
            if row.goal is not None:
                groups.setdefault(row.name, []).append(row)
        return [
            (min if group[0].goal.at_least else max)(group, key=lambda row: row.ratio)
            for group in groups.values()
        ]

    def print(self):
        """Everything, then the worst of each kind with a goal."""
        worst = self.worst()
        for title, rows in ((self.title, self.rows), (f"{self.title}: worst shapes", worst)):
            print(f"\n{title}: {describe(environment())}\n")
            print(table(Row.HEADER, [row.cells() for row in rows]))
        met = sum(row.is_met for row in worst)
        print(f"\n{met} of {len(worst)} kinds meet their goal at every shape. "
              f"Took {time.monotonic() - self.started:.0f} s.", flush=True)

    def save(self, path: Path | None):
        save(path, {"rows": [row.record() for row in self.rows]})


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def environment() -> dict[str, object]:
    """Where and when this runs."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "devices": torch.cuda.device_count() if cuda else 0,
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def describe(where: dict[str, object]) -> str:
    return f"{where['device']}, torch {where['torch']}, {where['date']}, {where['command']}"


def out_of_time(started: float, seconds: float, device: str) -> bool:
    """Decided by all ranks together: a rank that stops alone leaves the others waiting."""
    elapsed = torch.tensor(time.monotonic() - started, device=device)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return elapsed.item() > seconds


def save(path: Path | None, results: dict[str, object]):
    """Writes results and where they come from as JSON, if there is a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"environment": environment(), **results}, indent=1))
