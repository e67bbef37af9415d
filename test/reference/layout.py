"""Where the bytes of a shard lie; mirrors kernels/layout.h."""

from dataclasses import dataclass

from .formats import Format


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


@dataclass(frozen=True)
class Layout:
    format: Format
    rows: int  # rows held, padding included
    cols: int
    logical_rows: int
    matrix_rows: int
    row_offset: int | None = 0  # None: open, owns no logical rows

    @staticmethod
    def whole(format: Format, rows: int, cols: int) -> "Layout":
        return Layout(format, rows, cols, rows, rows, 0)

    @property
    def row_bytes(self) -> int:
        return round_up(self.cols, 16)

    @property
    def live_rows(self) -> int:
        if self.row_offset is None:
            return 0
        return max(0, min(self.rows, self.logical_rows - self.row_offset))

    @property
    def block(self) -> tuple[int, int]:
        return self.format.block or (max(1, self.matrix_rows), max(1, self.cols))

    @property
    def grid_shape(self) -> tuple[int, int]:
        matrices = self.logical_rows // self.matrix_rows if self.matrix_rows else 0
        # A matrix of per-tensor scaling is one block, even if it has no rows.
        per_matrix = ceil_div(self.matrix_rows, self.block[0]) if self.format.block else 1
        return matrices * per_matrix, ceil_div(self.cols, self.block[1])

    def grid_row(self, logical_row: int) -> int:
        matrix, row = divmod(logical_row, self.matrix_rows)
        return matrix * ceil_div(self.matrix_rows, self.block[0]) + row // self.block[0]

    def blocks(self):
        """(grid row, grid col, local rows, cols) of each part of a block that this shard holds."""
        rows_of: dict[int, list[int]] = {}
        for row in range(self.live_rows):
            rows_of.setdefault(self.grid_row(self.row_offset + row), []).append(row)
        for i, rows in rows_of.items():
            for j in range(self.grid_shape[1]):
                first = j * self.block[1]
                yield i, j, slice(rows[0], rows[-1] + 1), slice(first, first + self.block[1])
