"""Draws the documentation's figures into docs/figures: python docs/draw_figures.py [folder].

The figures are tracked by git, so that README and the pages show them on GitHub. `test_figures.py` fails where they
differ from what this script draws, and where a number differs from the file in bench/results that it names.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import FancyArrowPatch, Rectangle  # noqa: E402

FIGURES = Path(__file__).resolve().parent / "figures"
DATA = FIGURES.parents[1] / "bench" / "results" / "figures.json"
SCALE = FIGURES / "scale.json"
WATCHED = FIGURES / "watched.json"  # docs/watched_model.py writes it
BLUE, ORANGE, GREEN, GREY = "#4c72b0", "#dd8452", "#55a868", "#8c8c8c"


def box(axes, x, y, width, height, color, text, size=9):
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, alpha=0.25, edgecolor=color))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size)


def arrow(axes, start, end, text="", offset=(0, 0.12)):
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color="black"))
    middle = ((start[0] + end[0]) / 2 + offset[0], (start[1] + end[1]) / 2 + offset[1])
    axes.text(*middle, text, ha="center", fontsize=8)


def save(figure, path: Path) -> None:
    """Without a date, so that a figure that did not change has the same bytes."""
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def draw_concepts(path: Path) -> None:
    """Two ranks' shards of one weight: master, row image, grid; the flush and the gather."""
    figure, axes = plt.subplots(figsize=(9, 4.3))
    for rank, y in ((0, 2.3), (1, 0.3)):
        axes.text(0.0, y + 1.42, f"rank {rank}'s rows of a weight", fontsize=8.5, weight="bold")
        box(axes, 0, y, 2.2, 1.3, BLUE, "master = value\n(rows, columns)\nfp32, sharded")
        box(axes, 3.9, y, 1.9, 1.3, ORANGE, "row image: codes\nuint8, sharded")
        box(axes, 5.8, y, 0.5, 1.3, GREEN, "row\nscales", 7)
        arrow(axes, (2.2, y + 0.65), (3.9, y + 0.65), "flush: quantize", (-0.05, 0.1 if rank == 0 else -0.25))
    box(axes, 2.6, 1.72, 1.3, 0.46, GREY, "grid: scales of\nblocks and tensor", 6.5)
    arrow(axes, (3.25, 2.9), (3.25, 2.18), "")
    arrow(axes, (3.25, 0.95), (3.25, 1.72), "")
    axes.text(4.0, 1.95, "one all-reduce\nof amaxes", fontsize=8, va="center")
    box(axes, 7.9, 1.0, 1.4, 2.0, ORANGE, "gathered\nweight:\nall rows'\ncodes")
    box(axes, 9.3, 1.0, 0.4, 2.0, GREEN, "", 7)
    arrow(axes, (6.3, 2.95), (7.9, 2.3), "all-gather", (0.15, 0.2))
    arrow(axes, (6.3, 0.95), (7.9, 1.7), "1 byte an element", (0.55, -0.62))
    axes.text(8.8, 3.1, "F.linear multiplies these", ha="center", fontsize=8)
    axes.text(1.1, -0.05, "the optimizer writes here", ha="center", fontsize=8)
    axes.set_xlim(-0.1, 9.9)
    axes.set_ylim(-0.2, 4.0)
    axes.axis("off")
    save(figure, path)


def draw_rooms(path: Path) -> None:
    """The folders of the source that a weight and an activation pass, and the GEMM where they meet."""
    figure, axes = plt.subplots(figsize=(10.5, 5.6))
    width, height = 1.75, 1.05

    def room(x, y, color, name, does):
        box(axes, x, y, width, height, color, "")
        axes.text(x + width / 2, y + 0.84, name, ha="center", va="center", fontsize=8, weight="bold")
        axes.text(x + width / 2, y + 0.36, does, ha="center", va="center", fontsize=7.5)

    def lane(y, title, color, steps):
        axes.text(0, y + height + 0.16, title, fontsize=9, weight="bold")
        for number, step in enumerate(steps):
            x = 2.1 * number
            room(x, y, color, *step)
            if number:
                arrow(axes, (x - 2.1 + width, y + height / 2), (x, y + height / 2))

    lane(4.0, "a weight, once a step", BLUE, [
        ("torch.optim", "writes the value"),
        ("dispatch/aten", "writes the master,\nmarks the tensor"),
        ("dispatch/flush", "finds amaxes, one\nall-reduce of them"),
        ("kernels/quantize", "makes codes\nand scales"),
        ("fsdp", "gives FSDP2 the\nrow image to gather"),
    ])
    lane(0.2, "an activation, in each forward", ORANGE, [
        ("qshard/nn", "the module calls\none operator"),
        ("ops/linear", "checks the call,\nrecords autograd"),
        ("kernels/linear", "asks for the operands\nthat its GEMMs read"),
        ("kernels/activation", "makes codes, once\nfor all GEMMs"),
    ])
    room(8.4, 2.1, GREEN, "kernels/gemm", "multiplies codes,\nor says why not")
    arrow(axes, (9.27, 4.0), (9.27, 3.15), "gathered codes", (-0.72, -0.05))
    arrow(axes, (8.05, 0.9), (9.1, 2.1), "codes", (0.35, -0.2))
    arrow(axes, (8.4, 2.6), (6.9, 2.6), "output, bf16", (0.0, 0.12))
    axes.text(6.8, 2.6, "backward reads the saved codes of the input\n"
              "and the gathered codes of the weight again", fontsize=7.5, va="center", ha="right")
    room(0, 2.1, GREY, "loader", "registers all of it\nwhen it is loaded")
    axes.set_xlim(-0.1, 10.3)
    axes.set_ylim(0.0, 5.5)
    axes.axis("off")
    save(figure, path)


def draw_states(path: Path) -> None:
    """What a write, a flush and a gather do to the codes of a weight."""
    figure, axes = plt.subplots(figsize=(9, 3.3))
    states = (
        (0.0, GREEN, "scales synced", "codes are those of the value;\nall ranks have the scales"),
        (3.7, ORANGE, "codes stale", "the value is new,\nthe codes are old"),
        (7.4, BLUE, "codes current", "codes are those of the value;\nranks may not know the scales"),
    )
    for x, color, name, means in states:
        box(axes, x, 1.2, 2.5, 1.1, color, "")
        axes.text(x + 1.25, 2.02, name, ha="center", va="center", fontsize=9, weight="bold")
        axes.text(x + 1.25, 1.56, means, ha="center", va="center", fontsize=7)
    arrow(axes, (2.5, 2.0), (3.7, 2.0), "a write", (0, 0.1))
    arrow(axes, (3.7, 1.45), (2.5, 1.45), "a flush", (0, -0.27))
    arrow(axes, (6.2, 2.0), (7.4, 2.0), "this rank\nflushes alone", (0, 0.14))
    arrow(axes, (7.4, 1.45), (6.2, 1.45), "a write", (0, -0.27))
    axes.add_patch(FancyArrowPatch((8.65, 1.2), (1.25, 1.2), connectionstyle="arc3,rad=-0.16", arrowstyle="-|>",
                                   mutation_scale=12, color="black"))
    axes.text(4.95, 0.72, "a flush: all ranks agree on amaxes", ha="center", fontsize=8)
    axes.text(1.25, 2.55, "a gather of FSDP2 sends these", ha="center", fontsize=8)
    axes.text(4.95, 2.55, "a gather of FSDP2 flushes first", ha="center", fontsize=8)
    axes.set_xlim(-0.1, 10.1)
    axes.set_ylim(0.5, 2.8)
    axes.axis("off")
    save(figure, path)


def draw_step_time(data: dict, path: Path) -> None:
    """A panel for each run, and for each of its bars the eager step above the compiled one."""
    runs = data["runs"]
    heights = [len(run["bars"]) for run in runs]
    figure, panels = plt.subplots(
        len(runs), sharex=True, figsize=(9, 1.1 + 0.55 * sum(heights)), height_ratios=heights
    )
    for axes, run in zip(panels, runs):
        for place, bar in enumerate(run["bars"]):
            is_ours = bar["label"].startswith("qshard")
            for mode, y, color in (("eager", place - 0.2, BLUE), ("compiled", place + 0.2, ORANGE)):
                if bar[mode] is None:  # not measured in this run
                    continue
                ms, plain = bar[mode]["ms"], run["bars"][0][mode]["ms"]
                ratio = f"  ({ms / plain:.2f}x)" if place else ""
                axes.barh(y, ms, 0.38, color=color, alpha=1.0 if is_ours else 0.45, label=mode)
                axes.text(ms + 3, y, f"{ms:.1f}{ratio}", va="center", fontsize=8)
        axes.set_yticks(range(len(run["bars"])), [bar["label"] for bar in run["bars"]], fontsize=9)
        axes.invert_yaxis()
        axes.set_title(run["title"], fontsize=9.5, loc="left", weight="bold")
        axes.spines[["top", "right"]].set_visible(False)
    most = max(bar[mode]["ms"] for run in runs for bar in run["bars"] for mode in ("eager", "compiled") if bar[mode])
    panels[-1].set_xlim(0, 1.14 * most)
    panels[-1].set_xlabel("ms a step: shorter is faster")
    panels[0].legend(
        [Rectangle((0, 0), 1, 1, color=BLUE), Rectangle((0, 0), 1, 1, color=ORANGE)],
        ["eager", "compiled"], loc="lower right", frameon=False, fontsize=9,
    )
    figure.suptitle(data["title"], fontsize=11, x=0.01, ha="left")
    figure.text(0.01, -0.01, data["note"], fontsize=8.5, va="top")
    figure.tight_layout()
    save(figure, path)


def draw_scale(data: dict, path: Path) -> None:
    """A panel for each model: step time by the rate of the link, which has a logarithmic axis."""
    figure, panels = plt.subplots(1, len(data["panels"]), figsize=(9, 3.6))
    colors = (GREY, GREEN, ORANGE, BLUE)
    for axes, panel in zip(panels, data["panels"]):
        for line, color in zip(panel["lines"], colors):
            axes.plot(data["links"], [ms / 1e3 for ms in line["ms"]], color=color, marker=".", label=line["label"])
        axes.set_xscale("log")
        axes.set_xticks(data["links"][::2], [str(link) for link in data["links"][::2]], fontsize=8)
        axes.minorticks_off()
        axes.set_ylim(0)
        axes.set_xlabel("GB/s that a GPU sends")
        axes.set_title(panel["title"], fontsize=9.5, loc="left", weight="bold")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("seconds a step, by the model")
    panels[-1].legend(frameon=False, fontsize=8.5)
    figure.tight_layout()
    save(figure, path)


def draw_watched(data: dict, path: Path) -> None:
    """A panel for inputs and one for gradients: layers by steps, the share as a color and the last as a number."""
    panels_of = data["underflow_percent"]
    figure, panels = plt.subplots(1, len(panels_of), figsize=(9, 5.2), sharey=True, layout="constrained")
    for axes, (operand, rows) in zip(panels, panels_of.items()):
        image = axes.imshow(list(rows.values()), aspect="auto", cmap="YlOrRd", vmin=0, vmax=50, interpolation="nearest")
        places = range(0, len(data["steps"]), 5)
        axes.set_xticks(places, [str(data["steps"][place]) for place in places], fontsize=8)
        axes.set_yticks(range(len(rows)), [name.removesuffix(".weight") for name in rows], fontsize=8)
        for y, shares in enumerate(rows.values()):
            axes.text(len(shares) - 0.3, y, f"{shares[-1]:.0f}", fontsize=7, va="center")
        axes.set_title(operand, fontsize=9.5, loc="left", weight="bold")
        axes.set_xlabel("step")
        axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=panels, label="% of elements that underflow", shrink=0.6, pad=0.06)
    figure.suptitle(f"{data['recipe']}: what underflows in each layer", fontsize=11, x=0.01, ha="left")
    save(figure, path)


def draw_all(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update({"svg.hashsalt": "qshard", "svg.fonttype": "none"})  # text that a reader can search
    draw_concepts(folder / "concepts.svg")
    draw_rooms(folder / "rooms.svg")
    draw_states(folder / "states.svg")
    draw_watched(json.loads(WATCHED.read_text()), folder / "watched.svg")
    draw_scale(json.loads(SCALE.read_text())["plot"], folder / "scale.svg")
    draw_step_time(json.loads(DATA.read_text())["step_time"], folder / "step-time.svg")


if __name__ == "__main__":
    draw_all(Path(sys.argv[1]) if len(sys.argv) > 1 else FIGURES)
