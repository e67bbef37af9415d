"""`make demo`: what it builds, what it announces, what it draws."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]
EXAMPLES = CHECKOUT / "examples"


def dry_run(*arguments):
    """What `make` would run with these arguments alone.

    A `make` that runs the tests passes its own variables on to this one (MAKEFLAGS), as `ARCHITECTURES=…` of
    `make test ARCHITECTURES=…`.
    """
    passed_on = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARCHITECTURES", "CUDA", "GPU", "TORCH"}
    env = {name: value for name, value in os.environ.items() if name not in passed_on}
    command = ["make", "--dry-run", *arguments, "PYTHON=python3", "JOBS=1"]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True, env=env).stdout


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["demo.py", "--formats", "mxfp8", "--steps", "2", "--processes", "2", "3"])
    import demo

    return demo


@pytest.mark.parametrize(
    "arguments, cuda",
    [
        (["demo", "GPU_DEVICES=/nowhere"], "OFF"),
        (["demo", "GPU_DEVICES=/dev/null"], "AUTO"),
        (["demo", "GPU_DEVICES=/nowhere", "CUDA=ON"], "ON"),
        (["demo", "GPU_DEVICES=/nowhere", "CUDA=AUTO"], "AUTO"),
        (["demo", "GPU_DEVICES=/nowhere", "ARCHITECTURES=90a-real"], "AUTO"),
        (["test", "GPU_DEVICES=/nowhere"], "AUTO"),
        (["demo", "test", "GPU_DEVICES=/nowhere"], "AUTO"),
    ],
    ids=" ".join,
)
def test_only_the_demo_leaves_cuda_kernels_out(arguments, cuda, tmp_path):
    """And only where no device is there and nothing was asked for."""
    printed = dry_run(*arguments, f"VENV={tmp_path}")
    assert f"-DQSHARD_CUDA={cuda} " in printed


def test_the_demo_takes_a_build_that_is_there(tmp_path):
    (tmp_path / "torch-2.11.0-cuda-AUTO-built").touch()
    printed = dry_run("demo", "GPU_DEVICES=/nowhere", f"VENV={tmp_path}")
    assert "-DQSHARD_CUDA=OFF" not in printed


def test_it_says_first_what_it_does_and_how_long_it_takes(demo):
    args, extra = demo.parse_arguments()
    said = demo.plan(args, [*extra, "--dim", "64", "--hidden", "96", "--layers", "1", "--seq-len", "32"], True)
    assert "trains a small Llama 3 times for 2 steps" in said
    assert "on 2 processes, saves a checkpoint and resumes on 3" in said
    assert " 1 min " in said


def test_it_draws_losses_and_their_differences_to_the_first(demo, tmp_path, monkeypatch):
    import matplotlib.pyplot

    figures = []
    monkeypatch.setattr(matplotlib.pyplot, "close", figures.append)
    common = {"validation": {"2": 3.0}, "resumed_at": 1, "world_size": 2, "resumed_on": 3}
    runs = [
        {"name": "bf16", "losses": {"0": 5.0, "1": 4.0}, **common},
        {"name": "mxfp8", "losses": {"0": 5.5, "1": 4.25}, **common},
    ]
    demo.plot(runs, tmp_path / "loss.png")
    losses, differences = figures[0].axes
    drawn = [list(line.get_ydata()) for line in differences.get_lines()]
    assert [0.0, 0.0] in drawn and [0.5, 0.25] in drawn
    assert (tmp_path / "loss.png").stat().st_size


def test_one_process_gathers_nothing(demo):
    """As on a machine with one GPU."""
    run = {"name": "bf16", "losses": {"0": 2.0}, "validation": {"0": 2.0}, "weight_bytes": 8, "steps_per_second": 1.0}
    text = demo.table([run | {"gathered_bytes": 0}, run | {"name": "mxfp8", "weight_bytes": 6, "gathered_bytes": 0}])
    assert text.splitlines()[-1].split() == ["mxfp8", "2.000", "2.000", "6", "0.75x", "0", "1.00", "1.00x"]
