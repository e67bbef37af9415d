"""What a user who installs qshard meets: `python -m qshard`, a checkout beside the installed package,
and a library that was built for another torch."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import qshard

BUDGET_S = 45
CHECKOUT = Path(__file__).parents[3]
LIBRARY = Path(qshard.library_path()).resolve()
IMPLEMENTATION = LIBRARY.with_name("libqshard_impl.so")


def run(*args, **environment):
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), **environment}
    environment = {name: value for name, value in environment.items() if value is not None}
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=240, env=environment
    )


def test_python_m_qshard_says_what_there_is_and_tests_it():
    done = run("-m", "qshard", QSHARD_LIBRARY=str(LIBRARY))
    assert done.returncode == 0, done.stdout + done.stderr
    facts = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for start in (
        f"qshard {qshard.__version__}",
        f"library {LIBRARY}",
        f"built for torch {minor_of(torch.__version__)}, ",
        f"torch {torch.__version__} (",
        "key PrivateUse3, ours",
        "formats float8_tensorwise, ",
        "devices cpu",
        "backends cpu: " if not torch.cuda.is_available() else "backends cuda:0 ",
        "self-test passed on cpu",
    ):
        assert any(fact.startswith(start) for fact in facts), (start, facts)


def test_the_self_test_fails_where_something_does():
    """The exit status is what scripts look at."""
    script = (
        "import runpy, torch, qshard\n"
        "torch.nn.functional.linear = lambda x, w: x @ w.detach().sign().t()\n"
        "runpy.run_module('qshard', run_name='__main__')"
    )
    done = run("-c", script, QSHARD_LIBRARY=str(LIBRARY))
    assert done.returncode == 1 and "cpu mxfp8: a linear's output is off by" in done.stdout


def test_a_checkout_finds_the_installed_library(tmp_path):
    """The source folder hides the installed package, which alone has a library."""
    lib = tmp_path / "qshard" / "lib"
    lib.mkdir(parents=True)
    for file in (LIBRARY, IMPLEMENTATION):
        (lib / file.name).symlink_to(file)
    info = tmp_path / "qshard-9.8.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: qshard\nVersion: 9.8\n")
    print_it = "import qshard; print(qshard.__file__, qshard.library_path(), qshard.__version__)"
    path = os.pathsep.join([str(CHECKOUT), str(tmp_path)])
    done = run("-c", print_it, PYTHONPATH=path, QSHARD_LIBRARY=None)
    assert done.returncode == 0, done.stderr
    package, library, version = done.stdout.split()
    assert Path(package).parent == CHECKOUT / "qshard"
    assert library == str(lib / LIBRARY.name) and version == "9.8"


def test_without_a_library_the_error_says_how_to_get_one(tmp_path):
    done = run("-c", "import qshard", QSHARD_LIBRARY=str(tmp_path / "libqshard.so"))
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ImportError: qshard: no library at ")
    assert "pip install --no-build-isolation ." in last


# ------------------------------------------------------------------------- another torch, or none


def minor_of(version: str) -> str:
    return ".".join(version.split(".")[:2])


def build_loader(folder: Path, torch_minor: str, cuda: str = "") -> str:
    """libqshard.so as it is built for another torch, with nothing beside it."""
    compiler = shutil.which("g++")
    if not compiler:
        pytest.skip("needs g++, to build a loader")
    library = folder / "libqshard.so"
    macros = {
        "QSHARD_TORCH_MINOR": torch_minor,
        "QSHARD_CUDA_VERSION": cuda,
        "QSHARD_CUDA_ARCHITECTURES": "",
    }
    defines = [f'-D{name}="{value}"' for name, value in macros.items()]
    source = str(CHECKOUT / "loader" / "loader.cpp")
    subprocess.run(
        [compiler, "-std=c++20", "-shared", "-fPIC", *defines, f"-I{CHECKOUT}", source, "-ldl",
         "-o", str(library)],
        check=True,
    )
    return str(library)


def check_refusal(library: str, reason: str, *flags: str):
    """One line each for the package and for a bare load, and the process goes on."""
    done = run("-c", "import qshard", QSHARD_LIBRARY=library)
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert line.startswith(f"ImportError: qshard: {library} is not loaded: ") and reason in line
    assert "Warning" not in done.stderr

    script = (
        "import sys, torch; torch.ops.load_library(sys.argv[1])\n"
        "assert not hasattr(torch.ops.qshard, 'quantize')\n"
        "print(torch.ones(2).sum().item())"
    )
    done = run(*flags, "-c", script, library)
    assert done.returncode == 0 and done.stdout == "2.0\n", done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "qshard" in line]
    assert reason in line and "Warning: " in line


def test_a_library_for_another_torch_says_so(tmp_path):
    this = minor_of(torch.__version__)
    library = build_loader(tmp_path, "1.99")
    reason = f"it was built for torch 1.99, and this is torch {this}. Build it for"
    check_refusal(library, reason, "-W", "error")


@pytest.mark.only_where(lambda: torch.version.cuda is None)
def test_a_library_with_cuda_says_so_beside_a_cpu_torch(tmp_path):
    library = build_loader(tmp_path, minor_of(torch.__version__), cuda="13.0")
    check_refusal(library, "it was built for torch with CUDA 13.0, and this torch has no CUDA")


def test_what_the_dynamic_loader_refuses_is_one_line(tmp_path):
    library = build_loader(tmp_path, minor_of(torch.__version__))
    check_refusal(library, f"{tmp_path}/libqshard_impl.so: cannot open shared object file")


def test_without_torch_the_library_says_to_import_it():
    script = (
        "import ctypes, sys; library = ctypes.CDLL(sys.argv[1])\n"
        "library.qshard_load_error.restype = ctypes.c_char_p\n"
        "print(library.qshard_load_error().decode())"
    )
    done = run("-W", "ignore", "-c", script, str(LIBRARY))
    assert done.stdout == (
        f"qshard: {LIBRARY} is not loaded: there is no torch in this process: import it first\n"
    )
