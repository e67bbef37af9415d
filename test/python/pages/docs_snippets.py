"""docs_snippets.py <page.md>…: runs each page's ```python blocks, one after the other in one namespace.

Prints a JSON object: of each page "", or where and how it failed. What the pages leave out is here: a process
group of one rank, `world_size`, a `path` to write to, and a model with data to train it. "…/libqshard.so" is
the library under test, which must be loaded already."""

import contextlib
import io
import json
import os
import re
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist


class Llama(torch.nn.Module):
    """Blocks and a head, as a transformer has them."""

    def __init__(self):
        super().__init__()
        linear = torch.nn.Linear
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(linear(64, 128), torch.nn.SiLU(), linear(128, 64)) for _ in range(2)
        )
        self.lm_head = linear(64, 32)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.lm_head(x).float().square().mean()


def blocks(page: Path):
    """(line, source) of each block."""
    text = page.read_text()
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, match.start(1)), match.group(1)


def run(page: Path) -> str:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        names = {
            "Llama": Llama,
            "data": [torch.randn(8, 64) for _ in range(2)],
            "path": f"{folder}/checkpoint",
            "world_size": 1,
        }
        for line, source in blocks(page):
            try:
                source = source.replace("…/libqshard.so", os.environ["QSHARD_LIBRARY"])
                # Numbered as in the page, for the traceback.
                exec(compile("\n" * line + source, str(page), "exec"), names)
            except Exception:
                return traceback.format_exc()
    return ""


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        results = {page: run(Path(page)) for page in sys.argv[1:]}
    dist.destroy_process_group()
    print(json.dumps(results))
