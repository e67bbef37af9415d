"""Loading the library: beside threads that import, on whatever thread, and what may come first after it."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from helpers import ops
from test_install import build_loader

import qshard

BUDGET_S = 60
RACE = Path(__file__).with_name("load_beside_imports.py")
WHERE = pytest.mark.parametrize("where", ["main", "worker"])


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A pickled tensor."""
    path = tmp_path_factory.mktemp("loading") / "quantized.pt"
    torch.save(ops.quantize(torch.randn(8, 32), "float8_blockwise", keep_master=True), path)
    return str(path)


def run(*args):
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200)


# Importing torch takes seconds: programs are forks of one process that did.
FORKS = """
import json, os, sys, tempfile, traceback
import torch
programs = json.load(sys.stdin)
said = {}
for name, program in programs.items():
    program = "import faulthandler; faulthandler.dump_traceback_later(60, exit=True)\\n" + program
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            try:
                exec(compile(program, name, "exec"), {"__name__": "__main__"})
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        os.waitpid(pid, 0)
        output.seek(0)
        said[name] = output.read().decode()
json.dump(said, sys.stdout)
"""


def run_programs(programs, *args):
    """What each program says, by its name, run in a process that has imported torch and no more."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS, *args],
        input=json.dumps(programs),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


# ------------------------------------------------------------------ beside threads that import


@WHERE
def test_it_loads_beside_a_thread_that_imports(where, file, request):
    runs = 100 if request.config.getoption("--full") else 8
    done = run(RACE, qshard.library_path(), file, "--where", where, "--runs", runs)
    assert done.stdout == f"{runs} runs\n", done.stdout + done.stderr[-3000:]


@WHERE
def test_a_refusal_is_said_beside_a_thread_that_imports(where, tmp_path):
    library = build_loader(tmp_path, "1.99")
    done = run(RACE, library, "--where", where, "--runs", 8)
    assert done.stdout == "8 runs\n", done.stdout + done.stderr[-3000:]


# ------------------------------------------------------------------------- what may come first

SCRIPT = """
import datetime, io, pickle, sys, threading
import torch, torch.distributed as dist
library, file, where = sys.argv[1:]
failures = []

def act():
    try:
        first()
    except BaseException as error:
        failures.append(error)

{first}

if where == "main":
    act()
else:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
if failures:
    raise failures[0]
assert "qshard" not in sys.modules
print("went well")
"""

FIRST = {
    "torch.load": """
def first():
    torch.ops.load_library(library)
    assert type(torch.load(file)) is torch.Tensor
""",
    "pickle of long ago": """
def first():
    torch.ops.load_library(library)
    assert callable(pickle.loads(b"c_qshard_checkpoint\\nrebuild_tensor\\n."))
""",
    "fully_shard": """
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
model = torch.nn.Linear(32, 8)

def first():
    torch.ops.load_library(library)
    model.weight = torch.nn.Parameter(torch.load(file))
    x = torch.randn(4, 32)
    expected = model(x)
    fully_shard(model, mesh=mesh)
    assert torch.equal(model(x), expected)
    model.reshard()
    local = model.weight.to_local()
    assert torch.ops.qshard.is_quantized(local)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    codes = torch.ops.qshard.codes(local).view(torch.uint8).clone()
    model(x).sum().backward()
    optimizer.step()
    assert not torch.equal(torch.ops.qshard.codes(local).view(torch.uint8), codes)
""",
    "a traced call": """
from torch._subclasses.fake_tensor import FakeTensorMode

def first():
    torch.ops.load_library(library)
    with FakeTensorMode() as mode:
        fake = torch.ops.qshard.quantize(mode.from_tensor(torch.randn(4, 32)), "mxfp8")
        assert torch.ops.qshard.format(fake) == "mxfp8"
""",
}


@WHERE
def test_this_may_come_first(where, file):
    programs = {name: SCRIPT.format(first=first) for name, first in FIRST.items()}
    said = run_programs(programs, qshard.library_path(), file, where)
    assert said == dict.fromkeys(FIRST, "went well\n")


# --------------------------------------------------- a thread whose loading could not finish it

# A profiler of the user's: nothing calls the library on that thread once it is loaded.
PROFILED = """
import sys, threading, time, torch
library = sys.argv[1]
failures = []

def load():
    time.sleep(0.5)  # the main thread is to wait in join(), where it makes no pending calls
    sys.setprofile(lambda *args: None)
    torch.ops.load_library(library)
    assert sys.getprofile() is not None
    sys.setprofile(None)
    try:
        act()
    except BaseException as error:
        failures.append(error)

{act}

thread = threading.Thread(target=load)
thread.start()
thread.join()
if failures:
    raise failures[0]
print("went well")
"""

LATER = {
    # Modules that are imported in the middle of the operator see none of its modes.
    "the first tensor": """
def act():
    assert not hasattr(torch.Tensor, "fsdp_pre_all_gather")
    with torch.inference_mode(), torch.device("meta"):
        quantized = torch.ops.qshard.quantize(torch.randn(4, 32, device="cpu"), "float8_blockwise")
    assert hasattr(quantized, "fsdp_pre_all_gather") and quantized.device.type == "cpu"
    from torch.utils import flop_counter
    assert torch.ops.qshard.linear in flop_counter.flop_registry
""",
    "import qshard": """
def act():
    import qshard
    assert hasattr(torch.Tensor, "fsdp_pre_all_gather")
""",
    "many threads": """
def act():
    barrier, found = threading.Barrier(6), []
    def make():
        barrier.wait()
        q = torch.ops.qshard.quantize(torch.randn(4, 32), "float8_blockwise")
        found.append(hasattr(q, "fsdp_pre_all_gather"))
    threads = [threading.Thread(target=make) for _ in range(6)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert found == [True] * 6
    assert sum(type(finder).__name__ == "PatchOnImport" for finder in sys.meta_path) == 1
""",
    "a fork": """
import os
def act():
    pid = os.fork()
    if pid == 0:
        q = torch.ops.qshard.quantize(torch.randn(4, 32), "float8_blockwise")
        os._exit(0 if hasattr(q, "fsdp_pre_all_gather") else 1)
    assert os.waitpid(pid, 0)[1] == 0
""",
    # A tracer holds the other thread between two modules until this one is about to fork, which waits for it.
    "a fork in the middle": """
import os
def act():
    make = lambda: torch.ops.qshard.quantize(torch.randn(4, 32), "float8_blockwise")
    is_in_the_middle, is_forking = threading.Event(), threading.Event()
    def trace(frame, event, arg):
        is_last_line = event == "return" and frame.f_code.co_name == "<module>"
        if is_last_line and frame.f_globals["__name__"] == "qshard._runtime.hooks":
            is_in_the_middle.set()
            is_forking.wait()
        return trace
    def make_slowly():
        sys.settrace(trace)
        make()
    other = threading.Thread(target=make_slowly)
    other.start()
    is_in_the_middle.wait()
    assert "qshard._runtime.fakes" not in sys.modules
    os.register_at_fork(before=is_forking.set)  # the last that is registered runs first
    pid = os.fork()
    if pid == 0:
        os._exit(0 if hasattr(make(), "fsdp_pre_all_gather") else 1)
    assert os.waitpid(pid, 0)[1] == 0
    other.join()
""",
    "the error that is on its way": """
class Late:
    def __del__(self):
        torch.ops.qshard.quantize(torch.randn(4, 32), "float8_blockwise")

def act():
    try:
        late = Late()
        del late
        raise KeyError("first")
    except KeyError as error:
        assert error.args == ("first",)
    assert hasattr(torch.Tensor, "fsdp_pre_all_gather")
""",
    "nothing, and the process ends": """
def act():
    pass
""",
}


def test_what_needs_it_first_finishes_it():
    programs = {name: PROFILED.format(act=act) for name, act in LATER.items()}
    assert run_programs(programs, qshard.library_path()) == dict.fromkeys(LATER, "went well\n")


def test_a_failure_is_printed_once_and_raised_by_what_needs_it():
    script = textwrap.dedent(
        """
        import sys, torch
        sys.modules["torch.utils.flop_counter"] = None  # what the last of the modules imports
        torch.ops.load_library(sys.argv[1])
        assert not torch.ops.qshard.is_quantized(torch.ones(2))
        for attempt in range(2):
            try:
                torch.ops.qshard.quantize(torch.randn(4, 32), "float8_blockwise")
            except RuntimeError as error:
                line = str(error).splitlines()[0]
                assert line.startswith("qshard: the library's Python part failed to load (ModuleNotFound")
            else:
                raise AssertionError("quantized")
        try:
            import qshard
        except ImportError as error:
            assert line.startswith(str(error))  # and goes on with the call
        else:
            raise AssertionError("imported")
        print("went well")
        """
    )
    done = run("-c", script, qshard.library_path())
    assert done.stdout == "went well\n", done.stdout + done.stderr[-3000:]
    assert done.stderr.count("Traceback") == 1 and "import of torch.utils.flop_counter halted" in done.stderr
    assert 'File "qshard._runtime.fakes"' in done.stderr  # with the line


# --------------------------------------------------------------- modules that are wrapped later

LOOKED_FOR = """
import importlib, importlib.util, sys, torch
torch.ops.load_library(sys.argv[1])
name = "torch.distributed.checkpoint.state_dict"
assert name not in sys.modules
{before}
module = importlib.import_module(name)
assert module._init_optim_state.__globals__["__name__"] == "qshard._runtime.checkpoint", "not wrapped"
assert type(module.__loader__).__name__ == type(module.__spec__.loader).__name__ == "SourceFileLoader"
stock = module._init_optim_state
importlib.reload(module)
again = module._init_optim_state
assert again is not stock and again.__globals__["__name__"] == "qshard._runtime.checkpoint"
assert again.__closure__[0].cell_contents.__globals__["__name__"] == name, "wrapped twice"
print("went well")
"""


BEFORE = {
    "found": "assert importlib.util.find_spec(name).name == name",
    "failed": """
import torch.distributed.checkpoint
needed = "torch.distributed.fsdp"
known = sys.modules.get(needed)
sys.modules[needed] = None
try:
    importlib.import_module(name)
except ImportError:
    del sys.modules[needed]
else:
    raise AssertionError("imported")
if known:
    sys.modules[needed] = known
""",
}


def test_modules_that_were_looked_for_are_wrapped():
    programs = {name: LOOKED_FOR.format(before=before) for name, before in BEFORE.items()}
    assert run_programs(programs, qshard.library_path()) == dict.fromkeys(BEFORE, "went well\n")


# ------------------------------------------------------------------- the modules that are embedded

CHECKOUT = Path(__file__).parents[3]

NAMES = """
import importlib, pickle, sys, torch
torch.ops.load_library(sys.argv[1])
hooks = importlib.import_module("qshard._runtime.hooks")
assert hooks is sys.modules["_qshard_hooks"] and hooks.__name__ == "qshard._runtime.hooks"
old, new = (
    pickle.loads(b"c" + name + b"\\nrebuild_tensor\\n.")
    for name in (b"_qshard_checkpoint", b"qshard.serialization")
)
assert old is new is sys.modules["qshard._runtime.checkpoint"].rebuild_tensor
"""
NO_FILES = "\nsys.path_hooks.clear()\nsys.path_importer_cache.clear()\n"
WITHOUT = NAMES.replace("sys.argv[1])\n", "sys.argv[1])" + NO_FILES) + """
import qshard
assert type(qshard.__loader__).__name__ == "_PackageOfTheLibrary" and qshard._runtime.hooks is hooks
print("went well")
"""
WITH = NAMES + """
import qshard
from qshard import _runtime
assert hasattr(qshard, "quantize_") and qshard._runtime is _runtime is sys.modules["qshard._runtime"]
assert qshard._runtime.hooks is hooks and importlib.import_module("_qshard_hooks") is hooks
print("went well")
"""


def test_its_modules_have_one_name_and_exist_once():
    programs = {"with the package": WITH, "without it": WITHOUT}
    assert run_programs(programs, qshard.library_path()) == dict.fromkeys(programs, "went well\n")


def test_the_library_embeds_the_files_of_this_checkout():
    files = [*(CHECKOUT / "qshard" / "_runtime").glob("[!_]*.py"), CHECKOUT / "qshard" / "serialization.py"]
    for file in files:
        name = ".".join(file.relative_to(CHECKOUT).with_suffix("").parts)
        module = sys.modules[name]
        assert module.__spec__.origin == "libqshard.so" and not hasattr(module, "__file__")
        assert module.__loader__.get_source(name) == file.read_text(), f"{name}: build the library again"
    assert len(files) > 8
