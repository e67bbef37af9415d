"""tag_wheel.py <libqshard.so> <wheel> <folder>: the wheel under the name of what it was built for.

qshard-0.1.0 becomes qshard-0.1.0+torch2.11.cu130, or +torch2.11.cpu without CUDA kernels, in its file
name and in its metadata. What it was built for is asked of the library in it."""

import ctypes
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path


def local_version(library: str) -> str:
    with warnings.catch_warnings():  # it says that there is no torch here
        warnings.simplefilter("ignore")
        loaded = ctypes.CDLL(library)
    answers = []
    for name in ("qshard_torch_version", "qshard_cuda_version"):
        function = getattr(loaded, name)
        function.restype = ctypes.c_char_p
        answers.append(function().decode())
    torch, cuda = answers
    return f"torch{torch}.{'cu' + cuda.replace('.', '') if cuda else 'cpu'}"


def main(library: str, wheel: str, folder: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [sys.executable, "-m", "wheel", "unpack", "--dest", scratch, wheel], check=True
        )
        (unpacked,) = Path(scratch).iterdir()
        (info,) = unpacked.glob("*.dist-info")
        name, version = info.name.removesuffix(".dist-info").split("-")
        tagged = f"{version.split('+')[0]}+{local_version(library)}"
        metadata = info / "METADATA"
        text = metadata.read_text()
        assert f"\nVersion: {version}\n" in text
        metadata.write_text(text.replace(f"\nVersion: {version}\n", f"\nVersion: {tagged}\n", 1))
        info.rename(unpacked / f"{name}-{tagged}.dist-info")
        Path(folder).mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [sys.executable, "-m", "wheel", "pack", "--dest-dir", folder, str(unpacked)], check=True
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
