"""trusted_gemms.inc and docs/install.md say what the files bench/results/verify-*.json do."""

import json
import sys
from pathlib import Path

import pytest

from qshard.formats import info_of

CHECKOUT = Path(__file__).parents[3]
sys.path.insert(0, str(CHECKOUT / "docs"))
import trusted_gpus as script  # noqa: E402

ROWS = [
    ("kernel", "float8_blockwise", "equal"),
    ("gemm", "float8_blockwise", "within bound"),
    ("gemm", "float8_blockwise[x_block_scaling_dim=1]", "within bound"),
    ("gemm", "float8_tensorwise", "within bound"),
    ("gemm", "float8_delayed", "within bound"),
    ("gemm", "mxfp8", "skipped"),
]


def run(rows=ROWS, capability="9.0", device="NVIDIA H200"):
    rows = [dict(zip(("kind", "format", "result"), row)) for row in rows]
    return {"schema": script.SCHEMA, "device": device, "capability": capability, "torch": "2.11.0", "cuda": "13.0",
            "driver": "580.1", "rows": rows, "file": "verify-x.json"}


def changed(format, result, kind="gemm"):
    return [(k, f, result if (k, f) == (kind, format) else r) for k, f, r in ROWS]


@pytest.mark.parametrize("file", script.files(), ids=lambda file: file.name)
def test_what_is_written_is_what_the_files_say(file):
    assert file.read_text() == script.files()[file], "run docs/trusted_gpus.py"


def test_no_file_trusts_nothing(tmp_path):
    files = script.files(tmp_path)
    assert files[script.CONSTANT].count("\n") == 1 and "{" not in files[script.CONSTANT]
    assert "| none yet |" in files[script.PAGE] and "FP8, checked at first use" in files[script.PAGE]
    assert "right on" not in script.gemm_table([])


def test_one_file_is_read(tmp_path):
    (tmp_path / "verify-h200.json").write_text(json.dumps(run()))
    files = script.files(tmp_path)
    lines = files[script.CONSTANT].splitlines()[1:]
    assert lines == [
        '{90, "float8_blockwise"},', '{90, "float8_blockwise[x_block_scaling_dim=1]"},', '{90, "float8_delayed"},',
        '{90, "float8_tensorwise"},',
    ]
    page = files[script.PAGE]
    assert "| `float8_blockwise` linear | dequantized | dequantized | FP8, right on H200 | dequantized |" in page
    assert "| `float8_rowwise` linear | dequantized | dequantized | FP8, checked at first use | dequantized |" in page
    assert "FP8, checked at first use | FP8, right on H200 | FP8, checked at first use |" in page
    counts = "1 equal, 4 within bound, 1 skipped, 0 wrong"
    assert f"| `verify-h200.json` | NVIDIA H200 | 9.0 | 2.11.0 | 13.0 | 580.1 | {counts} |" in page
    assert "| right on H200 |" in page


@pytest.mark.parametrize("kind", ["gemm", "kernel"])
def test_what_is_wrong_is_not_trusted(kind):
    wrong = run(changed("float8_blockwise", "wrong", kind))
    known = script.trusted([wrong])
    assert (90, "float8_blockwise") not in known and (90, "float8_tensorwise") in known


def test_one_run_that_sees_it_wrong_is_enough():
    assert (90, "float8_blockwise") in script.trusted([run(), run()])
    wrong = run(changed("float8_blockwise", "wrong"), device="NVIDIA H100")
    assert (90, "float8_blockwise") not in script.trusted([run(), wrong])
    elsewhere = run(changed("float8_blockwise", "wrong"), capability="12.0")
    assert (90, "float8_blockwise") in script.trusted([run(), elsewhere])


@pytest.mark.parametrize("other", [{"schema": 0}, {"capability": "", "device": "cpu"}])
def test_other_files_are_refused(other, tmp_path):
    (tmp_path / "verify-x.json").write_text(json.dumps(run() | other))
    with pytest.raises(ValueError, match="verify-x.json"):
        script.runs(tmp_path)


def test_the_page_knows_which_gpus_have_which_gemms():
    for formats, _, first, last in script.GEMMS:
        for format in formats:
            gemm = info_of(format).gemm
            assert gemm.first_capability == script.number(first)
            assert gemm.last_capability == (script.number(last) if last else None)
