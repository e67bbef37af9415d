"""Loads the library under test when it is imported, in whatever process. QSHARD_LIBRARY names a libqshard.so
to test without the package; else it is the installed package's."""

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

# Inductor tries AVX-512, its bfloat16 and AMX in up to six interpreters in every process that compiles, which takes two
# thirds of the first compilation (torch/_inductor/cpu_vec_isa.py). Tests trust what the processor says of AVX-512, and do
# without the other two, because qshard's results do not depend on them.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
for instructions in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
    setattr(torch.cpu, instructions, lambda: False)

path = os.environ.get("QSHARD_LIBRARY")
# Inductor keeps compiled graphs on disk, and does not know that operators of another library may give other strides.
folder = Path(path).parent if path else Path(find_spec("qshard").origin).parent
stamp = max((file.stat().st_mtime_ns for file in folder.rglob("libqshard*.so")), default=0)
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/qshard-inductor-{stamp:x}")

if path:
    torch.ops.load_library(path)
else:
    import qshard  # noqa: F401
