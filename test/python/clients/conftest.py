import os
import sys
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def as_in_a_new_process():
    """A Trainer says in the environment what the next Accelerator is to be, which remembers it for the
    process: one that compiles makes each later one compile."""
    with mock.patch.dict(os.environ):
        yield
    if accelerate := sys.modules.get("accelerate"):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
