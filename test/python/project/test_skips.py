"""A skip names what the machine lacks. Any other reason fails the run, in one process and in several."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import skips

BUDGET_S = 60  # runs pytest six times
HARNESS = Path(skips.__file__).parent
LACKS_SOMETHING = """
import pytest

@pytest.mark.skipif(True, reason="needs a GPU")
def test_on_a_gpu():
    raise AssertionError

def test_on_any_machine():
    pass
"""
HIDES_A_TEST = """
import pytest

def test_that_is_hidden():
    pytest.skip("is slow")
"""
HIDES_A_FILE = """
import pytest

pytest.skip("is slow", allow_module_level=True)
"""


@pytest.mark.parametrize(
    "reason, known",
    [
        ("needs a GPU", True),
        ("cuda-3 needs 3 GPUs, found 1", True),
        ("needs torch >= 2.15", True),
        ("needs torchtitan; `make test-clients` installs the packages", True),
        ("every combination runs with --full", True),
        ("no CUDA device", False),
        ("needs time", False),
        ("takes seconds on a CPU", False),
    ],
)
def test_reasons_that_name_what_is_lacking_are_known(reason, known):
    assert skips.is_known(reason) == known


@pytest.mark.parametrize("processes", [(), ("-n", "1")], ids=["alone", "xdist"])
@pytest.mark.parametrize("text, exit_code", [(LACKS_SOMETHING, 0), (HIDES_A_TEST, 1), (HIDES_A_FILE, 1)])
def test_a_skip_without_a_known_reason_fails_the_run(tmp_path, text, exit_code, processes):
    (tmp_path / "test_other.py").write_text(LACKS_SOMETHING)
    (tmp_path / "test_written.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "skips", "-p", "no:cacheprovider", *processes, str(tmp_path)]
    environment = dict(os.environ, PYTHONPATH=str(HARNESS))
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == exit_code, done.stdout + done.stderr
    assert "needs a GPU" in done.stdout.split("skips by reason")[1]
    assert ("a skip for no known reason: is slow" in done.stdout) == (exit_code == 1)
