"""The packages are those of the Makefile's CLIENTS. Where one is missing its tests are skipped and say so."""

from importlib.util import find_spec

import pytest

PACKAGES = ("safetensors", "transformers", "accelerate", "peft")
MISSING = [package for package in PACKAGES if find_spec(package) is None]


class Missing(pytest.Module):
    def collect(self):
        reason = f"{', '.join(MISSING)} not installed; `make test-clients` installs the packages"
        pytest.skip(reason, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return Missing.from_parent(parent, path=module_path) if MISSING else None
