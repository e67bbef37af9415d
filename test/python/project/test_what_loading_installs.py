"""The table of patches, the page that shows it, and what a fresh process finds changed after loading."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import qshard

BUDGET_S = 45
CHECKOUT = Path(__file__).parents[3]
PAGE = runpy.run_path(str(CHECKOUT / "docs" / "what_loading_installs.py"))
TABLE = runpy.run_path(str(PAGE["TABLE"]))
PATCHES = TABLE["PATCHES"]

SCRIPT = """
import importlib, json, os, sys
modules, registries = json.loads(sys.argv[2])
import torch, torch.fx, torch._dynamo, torch.utils.flop_counter, torch.fx.experimental.proxy_tensor
for name in modules:
    importlib.import_module(name)
OURS = ("torch", "multiprocessing", "copy", "copyreg", "pickle", "os", "sys", "importlib")

def is_ours(name):
    return str(name).split(".")[0] in OURS

def look():
    # {place: the object there} for attributes of modules and of their classes
    found = {}
    for name, module in list(sys.modules.items()):
        if not is_ours(name) or module is None:
            continue
        for attribute, value in list(vars(module).items()):
            found[f"{name}:{attribute}"] = value
            if isinstance(value, type) and value.__module__ == name:
                for member, what in list(vars(value).items()):
                    found[f"{name}:{attribute}.{member}"] = what
    return found

def changed(before):
    # What a module that was imported meanwhile defines is no change; operators are found by their name.
    return sorted(
        place for place, value in look().items()
        if value is not before.get(place) and place.partition(":")[0] in loaded
        and (callable(value) or isinstance(value, property))
        and type(value).__name__ not in ("OpOverloadPacket", "_OpNamespace")
    )

def entries():
    found = {}
    for place in registries:
        module, _, path = place.partition(":")
        owner = sys.modules[module]
        for name in path.split("."):
            owner = getattr(owner, name)
        found[place] = dict(owner) if isinstance(owner, dict) else set(owner)
    return found

forks = []
os.register_at_fork, register_at_fork = (lambda **calls: forks.append(sorted(calls))), os.register_at_fork
loaded, before, known = set(sys.modules), look(), entries()
finders = list(sys.meta_path)
torch.ops.load_library(sys.argv[1])
said = {"library": changed(before), "grown": [place for place, now in entries().items() if now != known[place]]}
said["finders"] = [i for i, f in ((0, sys.meta_path[0]), (-1, sys.meta_path[-1])) if f not in finders]
said["more finders"] = len(sys.meta_path) - len(finders)
loaded, before, known = set(sys.modules), look(), entries()
import qshard
said["package"] = changed(before)
said["grown by the package"] = [place for place, now in entries().items() if now != known[place]]
loaded, before = set(sys.modules), look()
qshard.debug(True)
said["debug"] = changed(before)
qshard.debug(False)
said["after debug"] = changed(before)
said["forks"] = forks
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def found():
    modules = sorted({patch.module for patch in PATCHES} - {"transformers.modeling_utils"})
    registries = [patch.registry for patch in PATCHES if patch.registry]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, qshard.library_path(), json.dumps([modules, registries])],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=CHECKOUT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def targets(by, *how):
    return {
        patch.target
        for patch in PATCHES
        if patch.by == TABLE[by] and patch.how in [TABLE[name] for name in how]
        and not patch.target.startswith("transformers")
    }


def as_target(place):
    """The table names some classes by another module than their own."""
    for here, there in SAME:
        place = place.replace(here, there)
    return place


SAME = [
    ("torch.nn.modules.module:Module.", "torch.nn:Module."),
    ("torch.distributed.tensor:DTensor.", "torch.distributed.tensor._api:DTensor."),
    ("torch._C._dynamo.guards:", "torch:_C._dynamo.guards."),
]
CASES = [("library", "LIBRARY"), ("package", "PACKAGE"), ("debug", "DEBUG")]


@pytest.mark.parametrize("step, by", CASES, ids=[step for step, _ in CASES])
def test_attributes_that_a_fresh_process_finds_changed_are_those_of_the_table(found, step, by):
    places = {as_target(place) for place in found[step]}
    expected = targets(by, "WRAPS", "PROPERTY", "ADDS")
    expected.discard("torch.distributed._shard.sharded_tensor.api:_SHARDED_OPS")  # a dict: see registries
    assert places == expected


def test_registries_that_grow_are_those_of_the_table(found):
    grown = {patch.registry for patch in PATCHES if patch.registry and patch.by == TABLE["LIBRARY"]}
    assert set(found["grown"]) == grown
    grown = {patch.registry for patch in PATCHES if patch.registry and patch.by == TABLE["PACKAGE"]}
    assert set(found["grown by the package"]) == grown
    assert found["finders"] == [0, -1] and found["more finders"] == 2
    assert found["forks"] == [["before"]]


def test_debug_takes_away_what_it_installs(found):
    assert not found["after debug"]


def test_the_page_shows_the_table():
    assert PAGE["PAGE"].read_text() == PAGE["page"](), "run python docs/what_loading_installs.py"


def test_every_entry_has_a_reason_and_a_link():
    assert len({patch.target for patch in PATCHES}) == len(PATCHES)
    for patch in PATCHES:
        assert patch.reason and re.match(r"https://github.com/.+/(blob|issues)/", patch.upstream), patch


def test_what_the_table_lacks_is_refused():
    from qshard._runtime.patches import call, put, wrap

    for install in (wrap, lambda target: put(target, 1), call):
        with pytest.raises(LookupError, match="the table of patches has no .*torch:Tensor.backward"):
            install("torch:Tensor.backward")
