"""`python -m qshard`: what is installed, what it runs on, and whether it works. `python -m qshard verify` looks closer
(qshard/verify)."""

import platform
import sys
import time

import torch

import qshard
from qshard._library import about_library
from qshard.formats import info_of
from qshard.verify import main as verify

ops = torch.ops.qshard


def main() -> int:
    if sys.argv[1:2] == ["verify"]:
        return verify(sys.argv[2:])
    for name, value in _facts():
        print(f"{name:<11}{value}")
    print()
    start = time.perf_counter()
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    failed = []
    for device in devices:
        problems = dict(_self_test(device))
        failed += [str(device)] if problems else []
        if len(problems) == len(ops.formats()) and len(set(problems.values())) == 1:
            problems = {"every format": problems.popitem()[1]}
        for format, problem in problems.items():
            print(f"FAILED     {device} {format}: {problem}")
    where = f"failed on {', '.join(failed)}" if failed else f"passed on {', '.join(map(str, devices))}"
    print(f"self-test  {where} in {time.perf_counter() - start:.1f} s")
    return 1 if failed else 0


def _facts():
    about = about_library(qshard.library_path())
    torch_cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    yield "qshard", qshard.__version__
    yield "library", qshard.library_path()
    cuda = f"CUDA {about['cuda']}, sm {about['cuda_architectures']}" if about["cuda"] else "CPU only"
    yield "built for", f"torch {about['torch']}, {cuda}"
    yield "torch", f"{torch.__version__} ({torch_cuda})"
    yield "python", f"{platform.python_version()}, {' '.join(platform.libc_ver())}"
    yield "key", "PrivateUse3, ours"
    yield "formats", ", ".join(ops.formats())
    yield "devices", "cpu"
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        yield "", f"cuda:{i} {torch.cuda.get_device_name(i)}, compute capability {major}.{minor}"
    for i, line in enumerate(qshard.backend_report().splitlines()):
        yield "" if i else "backends", line


def _self_test(device: torch.device):
    """(format, what is wrong) of one device: each format quantizes, multiplies and is updated."""
    torch.manual_seed(0)
    for format in ops.formats():
        try:
            problem = _try_format(format, device)
        except Exception as error:  # a report of what fails, whatever it is
            problem = str(error).splitlines()[0]
        if problem:
            yield format, problem


def _try_format(format: str, device: torch.device) -> str:
    limit = 0.15 if info_of(format).code_bits == 4 else 0.04  # of the values, relative; their GEMMs' x 1.5
    value = torch.randn(128, 256, device=device)
    weight = torch.nn.Parameter(ops.quantize(value, format, keep_master=True))
    if not torch.equal(weight.detach() + 0, value):
        return "the master is not the value that was quantized"
    dequantized = ops.dequantize(weight.detach())
    if not (error := _error(dequantized, value)) < limit:
        return f"quantized values are off by {error:.1%}"
    x = torch.randn(64, 256, device=device)
    out = torch.nn.functional.linear(x, weight)
    if not (error := _error(out, x @ dequantized.t())) < 1.5 * limit:
        return f"a linear's output is off by {error:.1%}"
    out.square().mean().backward()
    with torch.no_grad():
        for updated in (weight, value):
            updated.sub_(weight.grad, alpha=0.1)
    if not torch.equal(weight.detach() + 0, value):
        return "an update is not bit-identical to that of a plain tensor"
    ops.flush([weight.detach()])
    if not (error := _error(ops.dequantize(weight.detach()), value)) < limit:
        return f"after an update quantized values are off by {error:.1%}"
    return ""


def _error(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    return ((tensor - expected).norm() / expected.norm()).item()


sys.exit(main())
