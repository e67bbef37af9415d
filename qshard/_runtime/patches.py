"""Changes what is not qshard's, by the table of patches and by nothing else: it refuses what the table lacks."""

import importlib
import sys

from qshard._runtime.patch_table import ADDS, CALLS, FINDER, PATCHES, PROPERTY, WRAPS

_by_target = {patch.target: patch for patch in PATCHES}
_later = {}  # by the name of a module: (path, make) of what is wrapped whenever the module is loaded


def _entry(target, *how):
    patch = _by_target.get(target)
    if patch is None or patch.how not in how:
        raise LookupError(f"qshard: the table of patches has no {' or '.join(how)!r} of {target}")
    return patch


def _owner(module, path):
    """(the object that has the attribute at the end of `path`, the name of that attribute), or None without
    it."""
    *names, last = path.split(".")
    owner = module
    for name in names:
        owner = getattr(owner, name, None)
    return (owner, last) if hasattr(owner, last) else None


def wrap(target):
    """Installs `make(stock)` in the place of the target: now, and whenever its module is loaded."""
    patch = _entry(target, WRAPS)

    def install(make):
        makes = _later.setdefault(patch.module, [])
        if (patch.path, make) not in makes:
            makes.append((patch.path, make))
        if patch.module in sys.modules:
            PatchOnImport.patch(importlib.import_module(patch.module))  # waits for a thread that imports it
        return make

    return install


def unwrap(target):
    """Takes away what wrap() installed."""
    patch = _entry(target, WRAPS)

    def remove(make):
        if (patch.path, make) not in _later.get(patch.module, ()):
            return
        _later[patch.module].remove((patch.path, make))
        module = sys.modules.get(patch.module)
        stocks = getattr(getattr(module, "__spec__", None), "patched_by_qshard", {})
        if patch.path in stocks:
            setattr(*_owner(module, patch.path), stocks.pop(patch.path))

    return remove


def put(target, value):
    """Sets an attribute that the stock class has not."""
    patch = _entry(target, PROPERTY, ADDS)
    owner, _, last = patch.path.rpartition(".")
    setattr(getattr(sys.modules[patch.module], owner), last, value)


def put_item(target, key, value):
    """Adds to a dict, if its module is loaded."""
    patch = _entry(target, ADDS)
    module = sys.modules.get(patch.module)
    if hasattr(module, patch.path):
        getattr(module, patch.path)[key] = value


def call(target, *args):
    """Calls a function that registers something for the process."""
    patch = _entry(target, CALLS)
    found = _owner(sys.modules[patch.module], patch.path)
    return getattr(*found)(*args)


def add_finder(target, finder):
    _entry(target, FINDER)
    if target == "sys:meta_path[0]":
        sys.meta_path.insert(0, finder)
    else:
        sys.meta_path.append(finder)


# -------------------------------------------------------------------------- modules that are loaded later


class PatchAfterLoading:
    """A module's loader, which patches the module."""

    def __init__(self, loader):
        self.loader = loader

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        PatchOnImport.patch(module)


class PatchOnImport:
    """Patches the table's modules whenever they are loaded. What later versions no longer have is left alone."""

    @staticmethod
    def patch(module):
        spec = module.__spec__  # a new one each time that the module is loaded
        stocks = spec.__dict__.setdefault("patched_by_qshard", {})  # what was there before, by path
        for path, make in _later[spec.name]:
            found = None if path in stocks else _owner(module, path)
            if found is not None:
                stocks[path] = getattr(*found)
                setattr(*found, make(stocks[path]))

    def find_spec(self, fullname, path, target=None):
        """What the other finders find. It remembers nothing, because code that looks for a module need
        not load it, and loading it may fail."""
        if fullname not in _later:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = PatchAfterLoading(spec.loader)
                return spec
        return None


add_finder("sys:meta_path[0]", PatchOnImport())
