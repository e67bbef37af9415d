"""Training text that every machine has: the sources of the running Python's standard library."""

import sysconfig
from pathlib import Path

import torch

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class StandardLibrary:
    """Batches of bytes, or of pairs of them as one token. Every 20th file is held out for validation.

    A batch depends on (seed, step, global batch) alone, never on the number of processes, so a run
    that resumes on another world size goes on with the same data.
    """

    def __init__(self, seq_len: int, seed: int, token_bytes: int = 1):
        root = Path(sysconfig.get_path("stdlib"))
        files = sorted(
            p for p in root.rglob("*.py") if not SKIPPED.intersection(p.relative_to(root).parts)
        )
        texts = [p.read_bytes() for p in files]
        self.seq_len, self.seed = seq_len, seed
        self.files = len(files)
        self.train = to_tensor((t for i, t in enumerate(texts) if i % 20), token_bytes)
        self.validation = to_tensor(texts[::20], token_bytes)

    def batch(self, step: int, global_batch: int, rank: int, world_size: int):
        """This rank's (inputs, targets) of training step `step`."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        return self._sequences(self.train, generator, global_batch, rank, world_size)

    def validation_batch(self, global_batch: int, rank: int, world_size: int):
        """This rank's part of the one validation batch, the same at every evaluation."""
        generator = torch.Generator().manual_seed(self.seed)
        return self._sequences(self.validation, generator, global_batch, rank, world_size)

    def _sequences(self, text, generator, global_batch, rank, world_size):
        starts = torch.randint(len(text) - self.seq_len, (global_batch,), generator=generator)
        mine = starts.chunk(world_size)[rank]
        rows = torch.stack([text[s : s + self.seq_len + 1] for s in mine.tolist()]).long()
        return rows[:, :-1], rows[:, 1:]


def to_tensor(texts, token_bytes: int = 1) -> torch.Tensor:
    text = torch.frombuffer(bytearray(b"\n".join(texts)), dtype=torch.uint8)
    if token_bytes == 1:
        return text
    pairs = text[: len(text) // 2 * 2].view(-1, 2).int()
    return pairs[:, 0] * 256 + pairs[:, 1]
