"""Imports the Python that the library brings, once, in whichever thread it is needed first.

loader/python_glue.cpp runs this file and calls `finish`. Python's import system lets other threads wait
meanwhile, and notices where two would wait for each other. A lock of ours, which a thread takes while
it waits for the GIL, would deadlock.
"""

import importlib
import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec

PACKAGE = "qshard._runtime"
NAME = f"{PACKAGE}.library"
# Their names until 0.1, by which pickles of that time find functions.
EARLIER_NAMES = {
    f"_qshard_{stem}": f"{PACKAGE}.{stem}"
    for stem in ("library", "placement", "debug", "hooks", "replicas", "checkpoint", "fakes")
}


class EmbeddedModules:
    """Finds and loads them. `sources`: their texts by name, in the order in which they are imported; the first
    is this file's. `natives`: functions of the library's, which become attributes of the module NAME."""

    def __init__(self, sources, natives):
        self.sources = sources
        self.natives = natives

    def find_spec(self, fullname, path, target=None):
        if fullname not in self.sources:
            return None
        return ModuleSpec(fullname, self, origin="libqshard.so")

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        name = module.__spec__.name
        exec(compile(self.sources[name], name, "exec"), module.__dict__)
        if name != NAME:
            return
        module.__dict__.update(self.natives)
        module.error = None
        try:
            for each in self.sources:
                if each != NAME:
                    self.load(each)
            sys.modules.update({old: sys.modules[new] for old, new in EARLIER_NAMES.items()})
        except BaseException as error:
            # The module stays, so that nothing is installed twice.
            module.error = error
        module.is_finished = True

    def load(self, name):
        if name.startswith(PACKAGE):
            return importlib.import_module(name)
        # Importing `qshard.serialization` would import the package first, which may not be installed.
        module = module_from_spec(self.find_spec(name, None))
        sys.modules[name] = module
        self.exec_module(module)

    def get_source(self, fullname):  # for tracebacks
        return self.sources.get(fullname)


def wait_for_others():
    """In a fork no thread goes on with an import that another one has begun, and none can begin it anew."""
    if NAME in sys.modules:
        importlib.import_module(NAME)


def make_package():
    """PACKAGE, in sys.modules: with it there, importing its modules does not import `qshard`, which may not be
    installed. Its path is empty, so that no module is also found as a file."""
    spec = ModuleSpec(PACKAGE, None, origin="libqshard.so", is_package=True)
    package = sys.modules.setdefault(PACKAGE, module_from_spec(spec))
    if "qshard" in sys.modules:
        sys.modules["qshard"]._runtime = package


def finish(sources, natives):
    """Whether the modules are there. False: another thread imports them, and waits for this one, which
    is about to import something."""
    make_package()
    finder = EmbeddedModules(sources, natives)
    sys.meta_path.append(finder)
    os.register_at_fork(before=wait_for_others)
    try:
        library = importlib.import_module(NAME)
    finally:
        sys.meta_path.remove(finder)
    if not getattr(library, "is_finished", False):
        return False
    if library.error is not None:
        raise library.error
    return True
