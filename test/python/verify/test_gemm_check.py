"""GEMMs that no run of verify has seen are checked when a weight arrives, and switched off if they are wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECKOUT = Path(__file__).parents[3]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BEGIN = """
import warnings, torch, qshard
import torch.nn.functional as F
from qshard._runtime.classes import Process
from qshard.formats import info_of
ops, cuda = torch.ops.qshard, torch.device("cuda")
reasons = Process.why_dequantized(cuda) if torch.cuda.is_available() else {}
here = [f for f, reason in reasons.items() if not reason]  # formats with GEMMs
assert here, "needs a GPU with GEMMs of codes"
def verdict(format):
    return Process.gemm_verdicts(cuda)[format]
x = torch.randn(64, 256, device=cuda).bfloat16()
w = torch.randn(128, 256)
"""


def program(text, words):
    """Runs it in a process of its own, whose environment says `words`."""
    path = f"{CHECKOUT}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "QSHARD_GEMM_CHECK": words, "PYTHONPATH": path}
    ran = subprocess.run([sys.executable, "-c", BEGIN + text], env=environment, capture_output=True, text=True,
                         timeout=300)
    if "needs a GPU with GEMMs of codes" in ran.stderr:
        pytest.skip("needs a GPU with GEMMs of codes")
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


@needs_cuda
def test_right_gemms_are_found_right_cuda():
    program("""
torch.manual_seed(0)
state = torch.cuda.get_rng_state()
for format in here:
    assert verdict(format) == "unchecked", format
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        q = ops.quantize(w.to(cuda), format)
        assert verdict(format) == "right", format
        assert "small products were right" in qshard.backend_report()
        F.linear(x, q)
    assert not caught, [str(one.message) for one in caught]
assert torch.equal(torch.cuda.get_rng_state(), state)
""", "always")


@needs_cuda
def test_wrong_gemms_are_switched_off_with_one_warning_cuda():
    program("""
for format in here:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        q = ops.quantize(w, format).to(cuda)  # also by a copy from elsewhere
        weights = [torch.nn.Parameter(q), torch.nn.Parameter(ops.quantize(w.to(cuda), format))]
        for weight in weights:
            given = x.detach().clone().requires_grad_()
            y = F.linear(given, weight)
            y.backward(torch.ones_like(y))
            values = ops.dequantize(weight.detach(), dtype=torch.bfloat16)
            torch.testing.assert_close(y.detach(), F.linear(x, values))
            if info_of(format).columnwise is None:  # else dgrad reads other values
                torch.testing.assert_close(given.grad, torch.ones_like(y) @ values, rtol=2e-2, atol=2e-1)
    said = [str(one.message) for one in caught]
    assert len(said) == 1 and f"GEMMs of {format} codes are wrong: forward" in said[0], said
    assert verdict(format) == "wrong"
    report = qshard.backend_report()
    assert f"{format} forward: dequantized GEMM, 2 times: its GEMMs were found to be wrong" in report, report
""", "break")


@needs_cuda
def test_wrong_gemms_are_an_error_if_asked_for_cuda():
    program("""
for format in here:
    for make in (lambda: ops.quantize(w.to(cuda), format), lambda: ops.quantize(w, format).to(cuda)):
        try:
            make()
        except RuntimeError as error:
            assert f"GEMMs of {format} codes are wrong" in str(error) and "QSHARD_GEMM_CHECK=error" in str(error)
        else:
            raise AssertionError(format)
    ops.quantize(w, format)  # a CPU has no such GEMM
    ops.quantize(w.to(cuda), f"{format}[emulate]")
""", "break,error")


@needs_cuda
def test_weights_that_stay_plain_are_checked_where_they_are_quantized_cuda():
    said = program("""
recipe = qshard.Float8CurrentScaling()
model = torch.nn.Sequential(torch.nn.Linear(256, 128, bias=False, device=cuda))
qshard.quantize_(model, recipe, weights="dynamic")
model(x.float()).sum().backward()
model(x.float()).sum().backward()
assert verdict(recipe.format) == "wrong"
""", "break")
    assert said.count("GEMMs of float8_tensorwise codes are wrong") == 1, said


@needs_cuda
def test_a_capture_checks_nothing_cuda():
    program("""
format = here[0]
source = w.to(cuda)
ops.quantize(source, f"{format}[emulate]")  # kernels are loaded
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    q = ops.quantize(source, format)
    assert verdict(format) == "unchecked"
graph.replay()
torch.cuda.synchronize()
assert torch.isfinite(F.linear(x, q)).all()
assert verdict(format) == "right"
""", "always")
