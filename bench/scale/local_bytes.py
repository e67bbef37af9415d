"""Bytes of one weight on one rank, from shapes alone: codes and row scales (image), master, scales that span rows (grid)."""

from dataclasses import dataclass

from qshard.formats import ScaleLevel, info_of

MASTER = 4  # bytes of an fp32 value
_ALIGNED = 16  # a row's codes, and the row, end at a multiple of so many bytes


def divided(size: int, parts: int) -> int:
    return -(-size // parts)


def _aligned(size: int) -> int:
    return divided(size, _ALIGNED) * _ALIGNED


def row_bytes(format: str, columns: int) -> int:
    """A row of the image: the codes, and those scales that span no other row."""
    info = info_of(format)
    has_scales = info.scale.place == "rows"
    scales = divided(columns, info.scale.block_cols) * info.scale.dtype.itemsize if has_scales else 0
    return _aligned(_aligned(divided(columns * info.code_bits, 8)) + scales)


def _grid_level(format: str) -> ScaleLevel | None:
    info = info_of(format)
    levels = (info.scale, info.outer_scale)
    return next((level for level in levels if level is not None and level.place == "grid"), None)


def grid_bytes(format: str, rows: int, columns: int) -> int:
    """Each rank of a weight has all of them."""
    level = _grid_level(format)
    if level is None:
        return 0
    blocks = (rows, level.block_rows), (columns, level.block_cols)
    height, width = (divided(size, block) if block else 1 for size, block in blocks)
    return level.dtype.itemsize * height * width


@dataclass(frozen=True)
class LocalBytes:
    image: int
    master: int
    grid: int


@dataclass(frozen=True)
class Weight:
    """What FSDP2 cuts: matrices below each other, of which tensor or expert parallelism has taken its part already."""

    rows: int
    columns: int
    matrices: int = 0  # 0: no stack of experts, so that FSDP2 cuts rows; else it cuts the stack between matrices

    def cut_in_rows(self, ranks: int) -> "Weight":
        """The part that a rank of ColwiseParallel has."""
        return Weight(divided(self.rows, ranks), self.columns)

    def cut_in_columns(self, ranks: int) -> "Weight":
        """The part that a rank of RowwiseParallel has."""
        return Weight(self.rows, divided(self.columns, ranks))

    def of_experts(self, ranks: int) -> "Weight":
        return Weight(self.rows, self.columns, divided(self.matrices, ranks))

    @property
    def numel(self) -> int:
        return self.rows * self.columns * max(self.matrices, 1)

    def padded_rows(self, shards: int) -> int:
        """Rows of a shard. FSDP2 pads all to the size of the first, also where a rank has fewer rows or none."""
        return divided(self.matrices, shards) * self.rows if self.matrices else divided(self.rows, shards)

    def on_a_rank(self, format: str, shards: int) -> LocalBytes:
        rows = self.padded_rows(shards)
        grid = max(self.matrices, 1) * grid_bytes(format, self.rows, self.columns)
        return LocalBytes(rows * row_bytes(format, self.columns), rows * self.columns * MASTER, grid)

    def gathered(self, format: str, shards: int) -> int:
        return shards * self.padded_rows(shards) * row_bytes(format, self.columns)
