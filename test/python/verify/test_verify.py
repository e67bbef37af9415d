"""`python -m qshard verify`: what it says of this machine, and that it finds what is wrong."""

import json
from types import SimpleNamespace

import pytest
import torch

import qshard
from qshard import verify
from qshard.verify import fused, gemms, kernels, plain
from qshard.verify.inputs import emulated
from qshard.verify.rows import EQUAL, SKIPPED, WITHIN, WRONG, Row, as_json, checked, compare_bits, compare_within
from qshard.verify.rows import summary, table

ops = torch.ops.qshard
CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SMALL = (64, 256)
FEW = ["float8_tensorwise", "float8_blockwise", "mxfp8_1x32", "nvfp4"]


class Altered:
    """The operators, one of which gives something else."""

    def __init__(self, name, change):
        self.name, self.change = name, change

    def __getattr__(self, name):
        function = getattr(ops, name)
        return (lambda *args, **kwargs: self.change(function(*args, **kwargs))) if name == self.name else function


def twice_in_one_place(made):
    tensor = next(t for t in made if t.numel()) if isinstance(made, (tuple, list)) else made
    place = tensor.view(-1)[:6][-1:]
    place.copy_(2 * place + 1)
    return made


def wrong_rows(rows):
    return {row.what for row in rows if row.is_wrong}


def test_the_cpu_is_right():
    rows = list(plain.rows(ops.formats()))
    assert not wrong_rows(rows), table(rows)
    assert {row.format for row in rows} >= {*ops.formats(), *map(emulated, ops.formats())}
    assert all(row.us is None for row in rows)


@pytest.mark.parametrize(
    "operator, whats",
    [
        ("dequantize", {"quantize, CPU", "dequantize, CPU"}),
        ("linear_forward", {"emulated linear, CPU, exact sums", "emulated linear, CPU, sums in fp32"}),
        ("linear_backward", {"emulated linear, CPU, exact sums"}),
        ("rotary_embedding", {"rotary embedding, CPU"}),
    ],
)
def test_a_wrong_operator_of_the_cpu_is_found(operator, whats, monkeypatch):
    monkeypatch.setattr(plain, "ops", Altered(operator, twice_in_one_place))
    assert whats <= wrong_rows(plain.rows(["float8_blockwise"]))


@pytest.mark.parametrize(
    "operator, whats",
    [
        ("dequantize", {"quantize, dequantize", "update, flush", "fused AdamW"}),
        ("quantize_input", {"codes of activations"}),
        ("_transposed_operand", {"transpose", "transpose after Hadamard"}),
        ("_encode_activation", {"message of an activation", "message of a gradient"}),
        ("quantize_gradients", {"message of weights' gradients"}),
        ("rotary_embedding", {"rotary embedding"}),
        ("join_rotary_embedding", {"rotary embedding of heads"}),
        ("_sum_rows", {"sums of rows"}),
        ("cross_entropy_and_gradient", {"cross entropy"}),
    ],
)
def test_a_kernel_that_is_wrong_on_one_device_is_found(operator, whats, monkeypatch):
    """Both are the CPU here; the second time, as the one that others are compared with, it is right."""
    cases = [case for case in kernels.cases(["float8_tensorwise"], SMALL) if case.what in whats]
    assert {case.what for case in cases} == whats
    for case in cases:
        if case.shape[0] > 64 or "stochastic" in case.format:
            continue
        right = case.parts(CPU)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "ops", Altered(operator, twice_in_one_place))
            wrong = case.parts(CPU)
        row = Row(case.what, "kernel", case.format, "", "")
        compare_bits(row, right, case.parts(CPU))
        assert row.result == EQUAL, row
        compare_bits(row, wrong, right)
        assert row.result == WRONG and "differ" in row.note


def test_every_kernel_case_runs():
    rows = [row for case in kernels.cases(FEW, SMALL) if case.shape[0] <= 64 for row in kernels.rows([case], CPU, None)]
    assert {row.result for row in rows} == {EQUAL}, table(rows)
    for case in kernels.cases(["float8_blockwise"], SMALL):
        if case.timed is not None:
            timed = case.timed(CPU)
            timed.before()
            timed.call()
            assert timed.bytes > 0


@pytest.mark.parametrize(
    "format", ["float8_tensorwise", "float8_rowwise", "float8_blockwise[x_block_scaling_dim=1]", "mxfp8", "nvfp4"]
)
def test_gemms_are_compared_with_the_emulated_ones(format, monkeypatch):
    """The emulated ones stand for a GPU's: right ones are within bound, wrong ones are found in each direction."""
    real = gemms.emulated
    everywhere = SimpleNamespace(why_dequantized=lambda device: dict.fromkeys(ops.formats(), ""))
    monkeypatch.setattr(gemms, "Process", everywhere)
    rows = list(gemms._linear(real(format), (37, 48, 200), CPU, None))
    assert {row.result for row in rows} == {WITHIN}, table(rows)
    assert all(row.error <= 1 for row in rows)
    calls = []

    def every_second(made):  # the GEMM, then what it is compared with
        calls.append(0)
        return twice_in_one_place(made) if len(calls) % 2 else made

    for operator, wrong in (("linear_forward", ["forward"]), ("linear_backward", ["grad_input", "grad_weight"])):
        monkeypatch.setattr(gemms, "ops", Altered(operator, every_second))
        rows = {row.what.removeprefix("linear "): row for row in gemms._linear(real(format), (37, 48, 200), CPU, None)}
        assert rows["forward"].is_wrong == ("forward" in wrong)
        assert rows[wrong[0]].is_wrong and "times its bound" in rows[wrong[0]].note


def test_a_shape_without_a_gemm_is_skipped_with_its_reason(monkeypatch):
    everywhere = SimpleNamespace(why_dequantized=lambda device: dict.fromkeys(ops.formats(), ""))
    monkeypatch.setattr(gemms, "Process", everywhere)
    rows = list(gemms._linear("float8_rowwise", (37, 47, 200), CPU, None))  # the CPU's linear, which has none
    assert [row.result for row in rows] == [SKIPPED] * 3 and {row.note for row in rows} == {"no FP8 GEMM on CPU"}


def test_what_has_no_gemm_is_skipped_with_its_reason():
    rows = list(gemms._linear("mxfp8", (37, 48, 200), CPU, None)) + list(gemms._experts("mxfp8", CPU))
    assert [row.result for row in rows] == [SKIPPED] * 4 and {row.note for row in rows} == {"no FP8 GEMM on CPU"}


def test_an_error_is_a_wrong_row():
    def fails(row):
        raise RuntimeError("first line\nsecond")

    row = checked(Row("it", "kernel", "", "1", ""), fails)
    assert row.is_wrong and row.note == "RuntimeError: first line"


def test_bounds_and_bits():
    row = Row("it", "kernel", "", "1", "")
    zero = torch.tensor([0.0, float("nan")])
    nan = torch.tensor([0xFFFFFFF1 - (1 << 32)], dtype=torch.int32).view(torch.float32)
    compare_bits(row, {"values": torch.cat([zero[:1], nan])}, {"values": zero})
    assert row.result == EQUAL  # any NaN
    compare_bits(row, {"values": -zero}, {"values": zero})
    assert row.result == WRONG  # -0.0
    for got, result in ((1.5, WITHIN), (2.5, WRONG), (float("nan"), WRONG), (1.0, WRONG)):  # a wrong part stays so
        row = row if got == 1.0 else Row("it", "gemm", "", "1", "")
        compare_within(row, *(torch.tensor([value]) for value in (got, 1.0, 1.0)))
        assert row.result == result


@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_program_prints_a_table_and_writes_json(is_wrong, tmp_path, monkeypatch, capsys):
    rows = [
        Row("quantize", "kernel", "mxfp8", "2x3", EQUAL, us=1.5, of_copy=0.91),
        Row("linear forward", "gemm", "mxfp8", "2x3x4", WITHIN, 0.25, us=2.0, tflops=123.4, of_bf16=1.6),
        Row("linear grad_input", "gemm", "mxfp8", "2x3x4", WRONG if is_wrong else SKIPPED, note="because"),
    ]
    monkeypatch.setattr(verify, "rows", lambda device: iter(rows))
    file = tmp_path / "verify.json"
    assert verify.main(["--json", str(file)]) == int(is_wrong)
    said = capsys.readouterr().out
    assert "quantize" in said and "0.91" in said and "123" in said
    assert f"1 equal, 1 within bound, {int(not is_wrong)} skipped, {int(is_wrong)} wrong" in said
    assert torch.cuda.is_available() or said.startswith("There is no GPU")
    found = json.loads(file.read_text())
    assert found["rows"] == list(as_json(rows))
    assert set(found) == {"schema", "device", "capability", "qshard", "torch", "cuda", "driver", "date", "rows"}
    assert found["torch"] == torch.__version__ and found["qshard"] == qshard.__version__
    assert summary(rows).startswith("1 equal")


@needs_cuda
def test_this_gpu_is_right_cuda():
    """But for the largest shapes, which `python -m qshard verify` itself takes."""
    device = torch.device("cuda")
    rows = list(kernels.rows(kernels.cases(ops.formats(), (512, 1024)), device, None))
    rows += list(fused.rows(device, None))
    rows += list(gemms.rows(ops.formats(), device, None, large=(512, 256, 512)))
    assert not wrong_rows(rows), table([row for row in rows if row.is_wrong])
    assert any(row.result == EQUAL for row in rows)
