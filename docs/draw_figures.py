"""Draws the documentation's figures: python docs/draw_figures.py [folder]. `make docs` does it by itself."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import FancyArrowPatch, Rectangle  # noqa: E402

BLUE, ORANGE, GREEN, GREY = "#4c72b0", "#dd8452", "#55a868", "#8c8c8c"


def box(axes, x, y, width, height, color, text, size=9):
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, alpha=0.25, edgecolor=color))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size)


def arrow(axes, start, end, text="", offset=(0, 0.12)):
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color="black"))
    middle = ((start[0] + end[0]) / 2 + offset[0], (start[1] + end[1]) / 2 + offset[1])
    axes.text(*middle, text, ha="center", fontsize=8)


def draw_concepts(path: Path) -> None:
    """Two ranks' shards of one weight: master, row image, grid; the flush and the gather."""
    figure, axes = plt.subplots(figsize=(9, 4.3))
    for rank, y in ((0, 2.3), (1, 0.3)):
        axes.text(0.0, y + 1.42, f"rank {rank}: rows of one weight", fontsize=9, weight="bold")
        box(axes, 0, y, 2.2, 1.3, BLUE, "master = value\n(rows, columns)\nfp32, sharded")
        box(axes, 3.9, y, 1.9, 1.3, ORANGE, "row image: codes\nuint8, sharded")
        box(axes, 5.8, y, 0.5, 1.3, GREEN, "row\nscales", 7)
        arrow(axes, (2.2, y + 0.65), (3.9, y + 0.65), "flush: quantize")
    box(axes, 2.55, 1.72, 1.0, 0.46, GREY, "grid: scales of\nblocks and tensor", 6.5)
    arrow(axes, (3.05, 2.9), (3.05, 2.18), "")
    arrow(axes, (3.05, 0.95), (3.05, 1.72), "")
    axes.text(3.6, 1.9, "one all-reduce\nof amaxes", fontsize=8, va="center")
    box(axes, 7.9, 1.0, 1.4, 2.0, ORANGE, "gathered\nweight:\nall rows'\ncodes")
    box(axes, 9.3, 1.0, 0.4, 2.0, GREEN, "", 7)
    arrow(axes, (6.3, 2.95), (7.9, 2.3), "all-gather,", (0.1, 0.2))
    arrow(axes, (6.3, 0.95), (7.9, 1.7), "1 byte an element", (0.2, -0.35))
    axes.text(8.8, 0.62, "F.linear multiplies these", ha="center", fontsize=8)
    axes.text(1.1, -0.05, "the optimizer writes here", ha="center", fontsize=8)
    axes.set_xlim(-0.1, 9.9)
    axes.set_ylim(-0.2, 4.0)
    axes.axis("off")
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def draw_all(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    plt.rcParams["svg.hashsalt"] = "qshard"
    draw_concepts(folder / "concepts.svg")


if __name__ == "__main__":
    draw_all(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "generated"))
