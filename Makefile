# make test, make demo: everything from a fresh clone, on a machine with g++, make and Python 3.10+.
#
#   TORCH=2.15.0     another torch      PYTHON=python3.12   another Python
#   FORMATS="…"      formats of the demo                    JOBS=2   compile jobs
#   CUDA=OFF         no CUDA kernels; ON: an error where they cannot be built; AUTO, the default: where there is
#                    an nvcc, but not for `make demo` on a machine without a GPU
#   ARCHITECTURES="90a-real;100"   machine code for these GPUs; else for this machine's, or all
#
# make test-clients: with the packages named below; NEWEST=1: with their newest versions on PyPI.
#   TORCH=2.15.0: with torchtitan 0.3 in the place of 0.2.
# make docs: build/docs/index.html; warnings are errors.
# make wheel: build/wheels/qshard-…+torch2.11.cu130-….whl, named after what it was built for.

TORCH ?= 2.11.0
PYTHON ?= $(firstword $(foreach p,python3.12 python3.11 python3.13 python3.10 python3,\
            $(shell $(p) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $(p))))
JOBS ?= $(shell nproc)
CUDA ?= AUTO
ARCHITECTURES ?=
VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin

# `make demo` alone, where no GPU could run its kernels: minutes of CPU code instead of a quarter of an hour
# of nvcc. A build with kernels that is there already serves, too. `make test` always compiles them.
GPU_DEVICES := /dev/nvidia* /dev/dxg
GPU ?= $(wildcard $(GPU_DEVICES))
ifeq ($(MAKECMDGOALS)$(ARCHITECTURES) $(CUDA),demo AUTO)
  ifeq ($(GPU)$(wildcard $(VENV)/torch-$(TORCH)-cuda-AUTO-built),)
    CUDA := OFF
  endif
endif

# The venv's own cmake and ninja, and never more compilers than JOBS.
export PATH := $(BIN):$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# torchtitan 0.2 runs with torch 2.11, and 0.3 needs torch 2.15.
TORCHTITAN := $(if $(filter 2.11%,$(TORCH)),0.2.2,0.3.0)

# What the tests of clients run with (test/python/clients): those of make test, and what
# make test-clients adds.
CLIENTS := safetensors==0.8.* transformers==5.23.* accelerate==1.15.* peft==0.21.* \
  compressed-tensors==0.20.*
MORE_CLIENTS := torchtitan==$(TORCHTITAN) lightning==2.6.* torchao==0.18.* nvidia-modelopt==0.47.* \
  bitsandbytes==0.50.* trl==1.16.* schedulefree==1.4.* pytorch-optimizer==4.1.* muon-fsdp2==0.3.*

# What builds the pages: for make docs, and for the test that they build without warnings.
PAGES := "sphinx>=8,<10" "myst-parser>=4,<6" furo

.PHONY: test demo build wheel docs format-check unit-test asan-test python-test test-clients clean

test: format-check unit-test asan-test python-test

demo: build
	python examples/demo.py $(if $(FORMATS),--formats $(FORMATS))

# One virtual environment per torch version asked for; the stamp's name says which is there.
venv := $(VENV)/torch-$(TORCH)
$(venv): pyproject.toml
	$(if $(PYTHON),,$(error no Python 3.10 or newer with venv and ensurepip found; set PYTHON=…))
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	python -m pip install --quiet torch==$(TORCH) numpy tqdm tabulate matplotlib pytest \
	  pytest-xdist expecttest scikit-build-core cmake ninja
	rm -f $(VENV)/torch-*
	touch $@

# Compiled in build/ci, shared with the GoogleTests; pip then packs and installs what is there.
sources := $(shell find CMakeLists.txt CMakePresets.json cmake kernels dispatch ops fsdp loader qshard \
             -type f -not -name '*.pyc')
built := $(venv)-cuda-$(CUDA)-built
build: $(built)
$(built): $(venv) $(sources)
	cmake --preset ci -DQSHARD_BUILD_TESTS=OFF -DQSHARD_CUDA=$(CUDA) \
	  "-DCMAKE_CUDA_ARCHITECTURES=$(ARCHITECTURES)" -DPython_EXECUTABLE=$(BIN)/python
	cmake --build --preset ci
	python -m pip install --quiet --no-deps --no-build-isolation --force-reinstall \
	  --config-settings=build-dir=build/ci .
	rm -f $(VENV)/torch-*-built
	touch $@

wheel: $(built)
	python -m pip install --quiet wheel
	rm -rf build/wheels/plain
	python -m pip wheel --quiet --no-deps --no-build-isolation \
	  --config-settings=build-dir=build/ci --wheel-dir build/wheels/plain .
	python cmake/tag_wheel.py build/ci/libqshard.so build/wheels/plain/*.whl build/wheels
	rm -rf build/wheels/plain

docs: $(built)
	python -m pip install --quiet $(PAGES)
	python -m sphinx -W --keep-going -q -b html docs build/docs

format-check: $(venv)
	@if command -v clang-format >/dev/null || command -v clang-format-14 >/dev/null; then \
	  cmake --preset ci -DPython_EXECUTABLE=$(BIN)/python -DQSHARD_BUILD_TESTS=OFF >/dev/null && \
	  cmake --build --preset ci --target clang-format-check; \
	else \
	  echo "clang-format not found: format not checked"; \
	fi

# GoogleTests of CUDA kernels need a GPU. Where there is none, the others run with sanitizers alone, beside a
# program that loads the library of the release build.
unit-test: $(built)
	@$(if $(GPU),,echo "no GPU in $(GPU_DEVICES): GoogleTests run with sanitizers only; GPU=1 builds them for CUDA")
	cmake --preset ci -DPython_EXECUTABLE=$(BIN)/python
	cmake --build --preset ci $(if $(GPU),,--target load_without_python)
	ctest --preset ci $(if $(GPU),,-R load_without_python)

asan-test: $(venv)
	cmake --preset asan -DPython_EXECUTABLE=$(BIN)/python
	cmake --build --preset asan
	ctest --preset asan

# pytest's exit status 5, "no tests collected", fails like any other.
clients := $(venv)-clients
$(clients): $(venv)
	python -m pip install --quiet torch==$(TORCH) $(CLIENTS) $(PAGES)
	touch $@

more_clients := $(venv)-more-clients
$(more_clients): $(clients)
	python -m pip install --quiet torch==$(TORCH) $(CLIENTS) $(MORE_CLIENTS)
	touch $@

# fuse_ knows the code of two versions of transformers: the tests of one run with the other, which lies
# beside what is installed.
other_transformers := $(VENV)/transformers-5.24
$(other_transformers): $(clients)
	python -m pip install --quiet --no-deps --target $@ transformers==5.24.*

ifeq ($(NEWEST),)
test-clients: $(built) $(more_clients) $(other_transformers)
	pytest -v --all-clients test/python/clients
	PYTHONPATH=$(other_transformers) pytest -v --all-clients test/python/clients/hugging_face/test_fuse_models.py
else
# In an environment of their own, which finds torch, pytest and qshard in the first: what breaks is a line
# of docs/clients.md. One file after the other, so that a package that cannot be imported breaks its own; a
# file for another torchtitan says so, and has no tests (5).
newest := $(VENV)/newest
test-clients: $(built)
	$(BIN)/python -m venv $(newest)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > $$($(newest)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/first.pth
	$(newest)/bin/python -m pip install --quiet --upgrade torch==$(TORCH) \
	  $(foreach p,$(CLIENTS) $(MORE_CLIENTS),$(firstword $(subst ==, ,$(p))))
	$(newest)/bin/python -m pip list --local
	status=0; for file in $(shell find test/python/clients -name "test_*.py"); do \
	  PATH=$(newest)/bin:$$PATH $(newest)/bin/python -m pytest -v --all-clients $$file \
	    || test $$? = 5 || status=1; \
	done; exit $$status
endif

# Two processes, each with files of its own: tests wait for the ranks of their worlds, half of the time.
python-test: $(built) $(clients)
	pytest -v -n 2 --dist loadfile --durations=15 test/python

clean:
	rm -rf build $(VENV) demo-out
