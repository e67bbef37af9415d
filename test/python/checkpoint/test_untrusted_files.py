"""Files from strangers: errors that name the fault, or tensors that can be read."""

import io
import itertools

import fuzz_files
import pytest
import torch
from file_mutations import Pickled, saved
from helpers import weight

from qshard._runtime.classes import SavedTensor, TensorState

ops = torch.ops.qshard
COUNT = 320  # here, in a plain build; 10,000 under AddressSanitizer: python fuzz_files.py --help
FIELDS = ("rows", "cols", "logical_rows", "matrix_rows", "row_offset", "keeps_master", "dirty")


def test_mutated_files_are_errors_or_tensors():
    counts, wrong = fuzz_files.run(fuzz_files.KINDS, 0, COUNT)
    assert sum(each.total() for each in counts.values()) == COUNT
    ours = [w for w in wrong if w[2] in fuzz_files.OURS]
    assert not ours, ours[0]
    for kind, outcomes in counts.items():  # neither all refused nor all harmless
        assert COUNT // 40 <= outcomes["error"] < outcomes.total(), (kind, outcomes)


def load(q, layout=(), **changed):
    """What a file of `q` gives in which some arguments are others."""
    rebuild, args = q.detach().__reduce_ex__(2)
    names = ("data", "pending", "layout", "format", "size", "stride", "storage_offset", "dtype")
    args = dict(zip((*names, "state", "requires_grad"), args))
    for field, number in dict(layout).items():
        args["layout"][FIELDS.index(field)] = number
    file = io.BytesIO(saved(Pickled(rebuild, (args | changed).values())))
    return torch.load(file, weights_only=True)


def blockwise():
    return ops.quantize(weight(4, 8), "float8_blockwise")


def pending(values):
    return load(blockwise(), {"dirty": 1}, pending=values)


def delayed(format="float8_delayed[history=4]", **changed):
    return load(ops.quantize(weight(4, 8), "float8_delayed[history=4]"), format=format, **changed)


def with_state(*tensors):
    return delayed(state=list(tensors))


FULL = (torch.zeros(3, 4), torch.zeros(3, 3))
HUGE = 2**40 - 1

# name: (call, fragment of the error)
FILES = {
    "rows that no memory holds": (
        lambda: load(blockwise(), {"rows": HUGE}),
        rf"claims {HUGE} x 8 elements of 4 rows in float8_blockwise, without a master, which take "
        r"\d+ bytes, but holds 80",
    ),
    "rows x cols beyond 2^64": (
        lambda: load(blockwise(), {"rows": 2**32, "cols": 2**32}),
        "which take more than .* bytes, but holds 80",
    ),
    "a master beyond 2^64": (
        lambda: load(blockwise(), {"rows": 2**31, "cols": 2**31, "keeps_master": 1}),
        "with a master, which take more than .* bytes, but holds 80",
    ),
    "a grid beyond 2^64": (
        lambda: load(
            blockwise(), {"rows": 0, "cols": HUGE, "logical_rows": HUGE, "matrix_rows": 1}
        ),
        "which take more than .* bytes",
    ),
    "matrices for a grid of their own": (
        lambda: load(blockwise(), {"logical_rows": 2**30, "matrix_rows": 1}),
        "which take .* bytes, but holds 80",
    ),
    "negative cols": (lambda: load(blockwise(), {"cols": -1}), "impossible size: 4 x -1"),
    "a flag of 2": (lambda: load(blockwise(), {"dirty": 2}), "says 2 where .* was written"),
    "an offset of 2^62": (
        lambda: load(blockwise(), size=[1, 8], storage_offset=2**62),
        "does not lie within a quantized tensor of 4 x 8",
    ),
    "an extent beyond 2^63": (
        lambda: load(blockwise(), size=[3, 8], stride=[2**62, 1]),
        "does not lie within",
    ),
    "an end beyond 2^63": (
        lambda: load(blockwise(), size=[2, 8], stride=[2**62, 1], storage_offset=2**62),
        "does not lie within",
    ),
    "negative strides": (lambda: load(blockwise(), stride=[-8, 1]), "none below 0"),
    "negative sizes": (lambda: load(blockwise(), size=[-4, 8]), "none below 0"),
    "an empty view before the storage": (
        lambda: load(blockwise(), size=[0, 8], storage_offset=-8),
        "none below 0",
    ),
    "65 dimensions": (
        lambda: load(blockwise(), size=[1] * 65, stride=[1] * 65),
        "65 dimensions and 65 strides",
    ),
    "sizes without strides": (lambda: load(blockwise(), stride=[1]), "2 dimensions and 1 strides"),
    "integers beyond 64 bits": (lambda: load(blockwise(), size=[2**64, 8]), "integers of 64 bits"),
    "floats for integers": (lambda: load(blockwise(), storage_offset=0.0), "integers of 64 bits"),
    "a number for a dtype": (lambda: load(blockwise(), dtype=6), "needs a torch.dtype"),
    "integer values": (
        lambda: load(blockwise(), dtype=torch.int32),
        "not a saved quantized tensor",
    ),
    "requires_grad of another type": (
        lambda: load(blockwise(), requires_grad="yes"),
        "a bool for requires_grad",
    ),
    # the tensors within
    "bytes of another dtype": (
        lambda: load(blockwise(), data=torch.zeros(80)),
        "not a saved quantized tensor",
    ),
    "expanded bytes": (
        lambda: load(blockwise(), data=torch.zeros(1, dtype=torch.uint8).expand(80)),
        "plain, contiguous tensor .* as its bytes",
    ),
    "sparse bytes": (
        lambda: load(blockwise(), data=torch.zeros(80, dtype=torch.uint8).to_sparse()),
        "plain, contiguous tensor .* as its bytes",
    ),
    "bytes on meta, state on the CPU": (
        lambda: delayed(data=torch.zeros(80, dtype=torch.uint8, device="meta")),
        "does not fit its format",
    ),
    "pending of another shape": (lambda: pending(torch.zeros(8, 4)), "update that does not fit"),
    "pending of another dtype": (lambda: pending(torch.zeros(4, 8).half()), "that does not fit"),
    "pending on meta": (lambda: pending(torch.zeros(4, 8, device="meta")), "that does not fit"),
    "expanded pending": (lambda: pending(torch.zeros(1, 1).expand(4, 8)), "as its pending update"),
    "quantized pending": (lambda: pending(blockwise()), "as its pending update"),
    "pending of a clean tensor": (
        lambda: load(blockwise(), pending=torch.zeros(4, 8)),
        "pending update where none can be",
    ),
    "no state": (lambda: with_state(), "has 0 tensors of state"),
    "state of another shape": (lambda: with_state(FULL[1], FULL[0]), "does not fit its format"),
    "expanded state": (
        lambda: with_state(torch.zeros(1, 1).expand(3, 4), FULL[1]),
        "as its amax_history",
    ),
    "rounding words below 0": (
        lambda: load(
            ops.quantize(weight(4, 8), "nvfp4[stochastic]"),
            state=[torch.tensor([1, -2, 3], dtype=torch.int32)],
        ),
        "has -2 among its words of stochastic rounding",
    ),
    "state of a format without": (lambda: load(blockwise(), state=[FULL[0]]), "has 1 tensors of"),
    # names of formats
    "a history of 10^12": (lambda: delayed("float8_delayed[history=1000000000000]"), "no option"),
    "a history that is not there": (
        lambda: delayed("float8_delayed[history=1048576]"),
        "does not fit its format",
    ),
    "an unknown format": (lambda: load(blockwise(), format="f9"), "unknown format 'f9'"),
    "a format name of 1 MB": (lambda: load(blockwise(), format="f" * 10**6), "of 1000000 char"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_false_claims_is_an_error_that_names_them(name):
    call, fragment = FILES[name]
    with pytest.raises(Exception, match=fragment):
        call()


def test_the_files_are_whole_without_a_change():
    assert torch.equal(load(blockwise()) + 0, blockwise() + 0)
    assert torch.equal(pending(torch.ones(4, 8)) + 0, torch.ones(4, 8))
    assert ops.format(with_state(*FULL)) == "float8_delayed[history=4]"


def test_names_of_wrong_files_leave_nothing_behind():
    """More names than there may be variants of formats: a registry that kept them would be full."""
    names = itertools.product(range(65), range(1, 70))
    for margin, history in names:
        with pytest.raises(RuntimeError, match="does not fit its format"):
            format = f"float8_delayed[margin={margin},history={history + 4}]"
            SavedTensor(*delayed_arguments(format)).read()
    assert ops.format(ops.quantize(weight(4, 8), "float8_delayed[history=999]")).endswith("999]")


def delayed_arguments(format):
    data, pending, layout, _, _ = TensorState(ops.quantize(weight(4, 8), "float8_delayed[history=4]")).pack()
    return data, pending, layout, format, [4, 8], [8, 1], 0, torch.float32, FULL


def test_a_file_cannot_put_its_own_storage_under_a_tensor():
    """torch's unpickler calls set_ with what a file's BUILD says."""
    rebuild, args = blockwise().__reduce_ex__(2)
    for size, offset in ((20, 2**40), (20, 0), (10**4, 0), (0, 0)):
        state = (torch.zeros(size)._typed_storage(), offset, (2**20, 8), (8, 1))
        with pytest.raises(RuntimeError, match="does not hold the|does not lie within"):
            torch.load(io.BytesIO(saved(Pickled(rebuild, args, state))), weights_only=True)
