"""The processes that train side by side."""

import queue
import time

import torch
from recipe_rows import ROWS
from train_row import train


def work(jobs, results, args, sizes, ends):
    """Takes runs until none is left or the time is short."""
    torch.set_num_threads(1)
    longest = 0.0
    while True:
        try:
            name, seed = jobs.get_nowait()
        except queue.Empty:
            break
        started = time.time()
        if started + longest > ends:
            results.put((name, seed, "no time was left"))
            continue
        try:
            outcome = train(ROWS[name], seed, sizes, args.device, not args.no_graphs)
        except Exception as error:
            outcome = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        longest = max(longest, time.time() - started)
        results.put((name, seed, outcome))
    results.put(None)
