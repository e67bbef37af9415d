"""Calls that may end the process: in a child, so that the tests go on."""

import os
import pickle
import signal

import torch

SECONDS = 60


def outcome(call):
    """(kind, text): the name of the exception that `call` raised, or "returned", or "died"."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        os.close(read)
        torch.set_num_threads(1)  # the parent's threads are not in this process
        try:
            answer = "returned", repr(call())
        except BaseException as error:
            answer = type(error).__name__, str(error)
        os.write(write, pickle.dumps((answer[0], answer[1][:20000])))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "died", f"signal {os.WTERMSIG(status)}"
    return pickle.loads(answer)


def refusal(call):
    """The text of the error that `call` must raise. It is one line, of a few hundred characters."""
    kind, text = outcome(call)
    assert kind not in ("died", "returned"), (kind, text)
    assert "\n" not in text and len(text) < 1000, text
    return text
