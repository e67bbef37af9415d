"""What `python -m qshard verify` finds: a row for each check."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from tabulate import tabulate

EQUAL, WITHIN, WRONG, SKIPPED = "equal", "within bound", "wrong", "skipped"


@dataclass
class Row:
    """One check, and how long what it checked takes. Times are those of a GPU, None without one."""

    what: str
    kind: str  # "kernel": its bits are compared; "gemm": its distance from the emulated one
    format: str  # "" where a kernel is of none
    shape: str
    result: str
    error: float | None = None  # the largest one as a share of its bound
    note: str = ""  # what is wrong, or why the check was skipped
    us: float | None = None
    of_copy: float | None = None  # the time of a device copy of the bytes read and written, over its own
    tflops: float | None = None
    of_bf16: float | None = None  # the time of a bfloat16 GEMM of the shape, over its own

    @property
    def is_wrong(self) -> bool:
        return self.result == WRONG


def checked(row: Row, check: Callable[[Row], None]) -> Row:
    """The row after `check` has filled it in; what it raises is what is wrong."""
    try:
        check(row)
    except Exception as error:  # a report of what fails, whatever it is
        first = (str(error).splitlines() or [""])[0]
        row.result, row.note = WRONG, f"{type(error).__name__}: {first}"[:200]
    return row


def compare_bits(row: Row, got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The row is wrong where a part has other bits than expected. All NaNs of values count as one."""
    row.result = EQUAL
    for name, wanted in expected.items():
        problem = _difference(got.get(name), wanted)
        if problem:
            row.result, row.note = WRONG, f"{name}: {problem}"
            return


def _difference(got: torch.Tensor | None, wanted: torch.Tensor) -> str:
    if got is None or (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
        return "is of another shape or dtype"
    different = _bits(got) != _bits(wanted)
    count = int(different.sum())
    return f"{count} of {different.numel()} differ, the first at {int(different.nonzero()[0])}" if count else ""


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().cpu().contiguous().flatten()
    if flat.dtype in (torch.float32, torch.bfloat16, torch.float16):
        flat = torch.where(flat.isnan(), torch.full_like(flat, float("nan")), flat)
    size = flat.element_size()
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])


def compare_within(row: Row, got: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> None:
    """The row is wrong where an element is farther from the expected one than its bound says. Both are of one
    device, and compared in float64."""
    if got.shape != expected.shape:
        row.result, row.note = WRONG, f"is of shape {tuple(got.shape)}, not {tuple(expected.shape)}"
        return
    share = (got.double() - expected.double()).abs() / bound.double().clamp(min=1e-300)
    largest = share.nan_to_num(nan=float("inf")).max().item() if share.numel() else 0.0
    # A row of several results has the worst of them.
    row.error = max(largest, row.error or 0.0)
    row.result = WRONG if largest > 1 or row.is_wrong else WITHIN
    if largest > 1:
        row.note = f"off by {largest:.3g} times its bound"


def table(rows: list[Row]) -> str:
    def shown(value, digits):
        return "" if value is None else f"{value:.{digits}f}"

    heads = ["what", "format", "shape", "result", "of bound", "µs", "of copy", "TFLOP/s", "of bf16", "note"]
    lines = [
        [row.what, row.format, row.shape, row.result, shown(row.error, 3), shown(row.us, 1), shown(row.of_copy, 2),
         shown(row.tflops, 0), shown(row.of_bf16, 2), row.note]
        for row in rows
    ]
    return tabulate(lines, headers=heads, disable_numparse=True)


def summary(rows: list[Row]) -> str:
    counts = Counter(row.result for row in rows)
    return ", ".join(f"{counts[result]} {result}" for result in (EQUAL, WITHIN, SKIPPED, WRONG))


def as_json(rows: list[Row]) -> Iterator[dict]:
    def plain(value):
        # JSON has no infinity.
        return round(min(value, 1e9), 4) if isinstance(value, float) else value

    for row in rows:
        yield {name: plain(value) for name, value in asdict(row).items()}
