"""Where the bytes of a shard lie; mirrors kernels/format/layout.h and kernels/format/boundary_blocks.h."""

from dataclasses import dataclass, replace

import torch

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

    # Row image: [codes | zeros to 16 B | a scale byte per block, in some formats | zeros to 16 B].

    @property
    def code_bytes(self) -> int:
        return ceil_div(self.cols * self.format.code_bits, 8)

    @property
    def row_scale_offset(self) -> int:
        return round_up(self.code_bytes, 16)

    @property
    def row_scale_bytes(self) -> int:
        if not self.format.row_scale:
            return 0
        blocks = self.block_shape[1]
        return ceil_div(blocks, self.block[0]) if self.format.sliced else blocks

    @property
    def image_row_bytes(self) -> int:
        return round_up(self.row_scale_offset + self.row_scale_bytes, 16)

    @property
    def row_bytes(self) -> int:
        return self.image_row_bytes * (2 if self.format.columnwise else 1)

    @property
    def rowwise(self) -> "Layout":
        return replace(self, format=replace(self.format, columnwise=None))

    @property
    def columnwise(self) -> "Layout":
        return replace(self, format=self.format.columnwise)

    # Blocks: of each matrix of the logical tensor, from its row 0 on.

    @property
    def live_rows(self) -> int:
        if self.row_offset is None:
            return 0
        return max(0, min(self.rows, self.logical_rows - self.row_offset))

    @property
    def matrices(self) -> int:
        return self.logical_rows // self.matrix_rows if self.matrix_rows else 0

    @property
    def block(self) -> tuple[int, int]:
        rows, cols = self.format.block or (None, None)
        return rows or max(1, self.matrix_rows), cols or max(1, self.cols)

    @property
    def block_rows_per_matrix(self) -> int:
        # A matrix of per-tensor scaling is one block, even if it has no rows.
        return ceil_div(self.matrix_rows, self.block[0]) if self.format.block else 1

    @property
    def block_shape(self) -> tuple[int, int]:
        """Block rows and block columns of the logical tensor."""
        return self.matrices * self.block_rows_per_matrix, ceil_div(self.cols, self.block[1])

    @property
    def grid_shape(self) -> tuple[int, int]:
        """A scale for every block, or for every matrix, or none."""
        if not self.format.row_scale:
            return self.block_shape
        return (self.matrices, min(1, self.cols)) if self.format.tensor_scale else (0, 0)

    def block_row(self, logical_row: int) -> int:
        matrix, row = divmod(logical_row, self.matrix_rows)
        return matrix * self.block_rows_per_matrix + row // self.block[0]

    def block_indices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Block row of each live row, block column of each column."""
        rows = [self.block_row(self.row_offset + row) for row in range(self.live_rows)]
        cols = [col // self.block[1] for col in range(self.cols)]
        return torch.tensor(rows, dtype=torch.int64), torch.tensor(cols, dtype=torch.int64)

    def cut_block_rows(self, ranks: int) -> list[int]:
        """Block rows of which several ranks hold rows once torch.chunk has cut dimension 0.

        That is among whole matrices in a tensor of several. Scales in the grid need no such list.
        """
        if self.format.columnwise:
            return self.columnwise.cut_block_rows(ranks)
        if not self.format.row_scale or self.matrices != 1 or self.cols == 0:
            return []
        holders: dict[int, set[int]] = {}
        for rank, rows in enumerate(torch.arange(self.logical_rows).chunk(ranks)):
            for row in rows.tolist():
                holders.setdefault(self.block_row(row), set()).add(rank)
        return sorted(i for i, ranks_of in holders.items() if len(ranks_of) > 1)
