"""What qshard.integrations say of packages that they are not for."""

import os
import subprocess
import sys

import qshard


def test_a_torchtitan_of_another_version_is_named(tmp_path):
    """One that has neither of the parts by which the two known versions are told."""
    for folder in ("torchtitan", "torchtitan/config"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", "import qshard.integrations.torchtitan"],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": path, "QSHARD_LIBRARY": qshard.library_path()},
    )
    assert done.returncode != 0
    assert "neither torchtitan.config.job_config, as 0.2, nor torchtitan.config.conf" in done.stderr
