"""README's programs run as they are pasted into an empty folder, and its figures are in the files that it links."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import docs_snippets
import pytest
import torch
import torch.distributed.checkpoint as dcp

import qshard

BUDGET_S = 60  # three processes that import torch
CHECKOUT = Path(__file__).parents[3]
README = CHECKOUT / "README.md"
PROGRAMS = [source for _, source in docs_snippets.blocks(README)]
A_MINUTE = 60


def command_of(source):
    """What a first line `# torchrun …` says, in a rendezvous of its own; else plain Python runs the program."""
    name = "program.py"
    launcher = re.match(r"# torchrun (.*) (\S+\.py)\n", source)
    if launcher is None:
        return name, [sys.executable, name]
    name = launcher[2]
    return name, [sys.executable, "-m", "torch.distributed.run", "--standalone", *launcher[1].split(), name]


def run_as_pasted(source, folder):
    """What the program prints, and the seconds of processor time that it takes, on the CPU."""
    name, command = command_of(source)
    (folder / name).write_text(source)
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(qshard.__file__).parents[1]),
        "QSHARD_LIBRARY": qshard.library_path(),
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Warning: qshard" not in done.stderr, done.stderr
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def losses(printed):
    return [float(loss) for loss in re.findall(r"loss (\S+)", printed)]


def plain_blocks(number):
    linear = torch.nn.Linear
    return [torch.nn.Sequential(linear(256, 512), torch.nn.GELU(), linear(512, 256)) for _ in range(number)]


def test_the_quick_start(tmp_path):
    printed, seconds = run_as_pasted(PROGRAMS[0], tmp_path)
    assert seconds < A_MINUTE
    first, *_, last = losses(printed)
    assert last < first / 4
    assert "float8_blockwise" in printed  # the report
    saved = tmp_path / "model.pt"
    assert b"qshard" not in saved.read_bytes()
    plain_blocks(1)[0].load_state_dict(torch.load(saved, weights_only=True))


def test_the_loop_under_fsdp2(tmp_path):
    printed, _ = run_as_pasted(PROGRAMS[1], tmp_path)
    assert len(losses(printed)) == 6  # rank 0 alone prints
    assert losses(printed)[-1] < losses(printed)[0] / 1.5
    assert len(list((tmp_path / "checkpoint").glob("*.distcp"))) == 2  # one for each rank
    model = torch.nn.Sequential(*plain_blocks(2))
    weight = model[0][0].weight.detach().clone()
    dcp.load({"model": model.state_dict()}, checkpoint_id=str(tmp_path / "checkpoint"), no_dist=True)
    assert not torch.equal(model[0][0].weight, weight)


def test_there_are_two_programs():
    """A third would need a test of its own."""
    assert len(PROGRAMS) == 2


def section(title):
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README.read_text(), re.MULTILINE | re.DOTALL)
    return found[1]


def bullets():
    head = README.read_text().split("\n## ")[0]
    items = re.findall(r"^- (.*?)(?=^- |\n\n)", head, re.MULTILINE | re.DOTALL)
    return [" ".join(item.split()) for item in items]


@pytest.mark.parametrize("bullet", bullets(), ids=lambda bullet: bullet[2:28])
def test_a_reason_has_a_figure_with_gpu_date_and_source(bullet):
    assert re.search(r"\b(H100|H200)\b", bullet)
    source = re.search(r"\[\d+ \w+ 2026\]\((bench/results/[\w.-]+)\)", bullet)
    assert source, "a dated link to bench/results"
    record = (CHECKOUT / source[1]).read_text()
    for figure in re.findall(r"\b(\d[\d.,]*\d) (?:ms|GB|MB)\b", bullet):
        whole = rf"(?<![\d.]){re.escape(figure)}(?![\d.]*\d)"
        assert re.search(whole, record), f"{source[1]} lacks {figure}"


def test_ratios_are_those_of_the_times_before_them():
    times = r"([\d.]+) ms[^()]*?([\d.]+) ms \(([\d.]+)x\)"
    found = re.findall(times, " ".join(bullets()))
    assert len(found) == 2
    for ours, plain, ratio in found:
        assert f"{float(ours) / float(plain):.2f}" == ratio


def test_it_is_short():
    assert len(bullets()) == 3
    assert len(README.read_text().splitlines()) <= 150
    assert len(re.findall(r"^\d+\. ", section("Where to go"), re.MULTILINE)) == 10
