"""What jobs of torchtitan, of both versions, are given in place of what CPUs and tests do not have."""

import contextlib
import dataclasses
import multiprocessing
import os
import re
import threading
from pathlib import Path
from unittest import mock

import torch
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

_histc = torch.histc


def cpu_as_accelerator():
    """torchtitan looks for an accelerator when it is imported; here it finds the CPU."""
    return mock.patch("torch._utils._get_available_device_type", lambda: "cpu")


def histc_of_integers():
    """CPUs have torch.histc for floats alone."""
    return mock.patch("torch.histc", lambda x, **kwargs: _histc(x.float(), **kwargs).long())


@contextlib.contextmanager
def permutations_on_cpu():
    """torchtitan 0.2 permutes tokens of expert parallelism by a kernel of Triton, which it has for the CPU, too."""
    from torchtitan.models.moe import utils

    stock = utils.generate_permute_indices
    with mock.patch.object(utils, "generate_permute_indices", lambda *args: stock(*args, use_cpu=True)):
        yield


step_is_near = threading.Event()


@contextlib.contextmanager
def late_stager():
    """Asynchronous checkpoints by copies without streams, which CPUs lack. What copies beside a forward
    does so as late as torchtitan allows: when it waits, before a step."""
    stock_init, stock_stage = DefaultStager.__init__, DefaultStager._stage

    def init(self, config=StagingOptions()):
        stock_init(self, dataclasses.replace(config, use_non_blocking_copy=False))

    def stage(self, *args, **kwargs):
        if self._config.use_async_staging and not step_is_near.wait(600):
            raise TimeoutError("no step waited for the copies")
        return stock_stage(self, *args, **kwargs)

    # A process of the checkpoint's own writes what is staged; those of tests' ranks are to have none.
    of_ranks = mock.patch.dict(multiprocessing.current_process()._config, daemon=False)
    address = mock.patch.dict(os.environ, MASTER_ADDR="127.0.0.1")
    with mock.patch.multiple(DefaultStager, __init__=init, _stage=stage), of_ranks, address:
        yield
    _async_process_executor._CHECKPOINT_PROCESS = None  # ends with it


def documented(heading):
    """The first block of code below a heading of docs/clients.md."""
    page = (Path(__file__).parents[4] / "docs/clients.md").read_text()
    return re.search(rf"^### {heading}$.*?^```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]


class Nothing:
    """A data loader without a position."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass
