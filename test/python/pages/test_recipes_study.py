"""bench/recipes_study: its rows, its tables, and what it records, of made-up losses and of a model of few steps."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

import qshard

sys.path.append(str(Path(__file__).parents[3] / "bench" / "recipes_study"))
import record_study  # noqa: E402
import study_tables  # noqa: E402
from recipe_rows import LAST_BLOCKS, ROWS, is_plain  # noqa: E402
from train_row import TINY, Run, train  # noqa: E402

LOSSES = {"bf16": [1.0, 1.02, 1.01, 1.03, 0.99], "mxfp8": [1.001, 1.0302], "nvfp4": [1.02]}


def made_up():
    runs = {
        name: {str(seed): {"loss": loss, "losses": {str(50 * i): loss + 2 - i / 10 for i in range(1, 21)}}
               for seed, loss in enumerate(losses)}
        for name, losses in LOSSES.items()
    }
    where = {"device": "NVIDIA H200", "torch": "2.11.0", "date": "2026-11-28", "workers": 6, "seconds": 540}
    return {"environment": where, "sizes": dataclasses.asdict(TINY), "runs": runs, "failed": []}


def test_differences_are_those_of_the_same_seeds():
    runs = made_up()["runs"]
    assert study_tables.seed_noise(runs) == pytest.approx(100 * 0.04 / 1.01)
    assert study_tables.differences(runs, "mxfp8") == pytest.approx([0.1, 1.0])
    bf16, mxfp8, nvfp4 = study_tables.cells(runs)
    assert bf16[1:] == ["1.0100", "", "", "", "5"]
    assert mxfp8[1:] == ["1.0156", "+0.0056", "+0.55", "+0.10 to +1.00", "2"]
    assert nvfp4[1:] == ["1.0200", "+0.0200", "+2.00", "+2.00 to +2.00", "1"]
    assert study_tables.steps_of_curve(runs) == [250, 500, 750, 1000]


def test_what_is_recorded_has_each_number_of_the_table():
    data = made_up()
    page = record_study.record(data)
    table = json.loads("{" + record_study.figure(data, "bench/results/2026-11-28-recipes.md") + "}")
    rows = table[record_study.TABLE]["rows"]
    assert len(rows) == 3 and rows[0]["gpus"] == "one H200"
    for row in rows:
        lines = "\n".join(line for line in page.splitlines() if line.startswith(row["lines"][0]))
        for number in re.findall(r"\d[\d,]*(?:\.\d+)?", " ".join(row["cells"][1:])):
            assert number in lines


def test_the_last_blocks_of_the_papers_recipe_are_plain():
    row = ROWS["nvfp4"]
    assert row.plain_blocks == LAST_BLOCKS
    plain = [is_plain(row, f"layers.{i}.ffn.up", 7) for i in range(7)]
    assert plain == [False] * 6 + [True]
    assert is_plain(row, "head", 7) and not is_plain(ROWS["mxfp8"], "layers.6.ffn.up", 7)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4_then_bf16", "nvfp4_forward_bf16"])
def test_runs_of_a_seed_begin_alike_and_end_trained(name):
    reference, run = Run(ROWS["bf16"], 1, TINY, "cpu"), Run(ROWS[name], 1, TINY, "cpu")
    assert reference.starts.equal(run.starts)
    for mine, theirs in zip(run.model.parameters(), reference.model.parameters()):
        assert (mine + 0).equal(theirs)
    assert qshard.is_quantized(run.model.layers[0].ffn.up.weight)
    assert qshard.is_quantized(run.model.layers[3].ffn.up.weight) == (name == "mxfp8")
    done = train(ROWS[name], 1, TINY, "cpu", graphs=True)
    assert list(done["losses"]) == [3, 6] and done["loss"] < 5.6
    assert run.is_switch(5) == (name != "mxfp8")
