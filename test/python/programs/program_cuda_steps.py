"""Steps of random programs that GPUs alone have: streams, graphs, copies that do not block. See
program_steps.py."""

import torch
from program_alias_steps import SIMPLE_WRITES, draw_layer
from program_model_steps import output_of
from program_steps import step
from program_tensor_steps import WRITES, draw_write, through


def on_cuda(draw):
    """Drawn on GPUs, of weights that lie there."""
    return lambda d: draw(d) if d.device_type == "cuda" and not d.setup.offload else None


def on_side_stream():
    """A stream that starts after the current one, as a user must order it, and the current one after it."""

    class Side(torch.cuda.StreamContext):
        def __enter__(self):
            self.stream.wait_stream(torch.cuda.current_stream())
            return super().__enter__()

        def __exit__(self, *error):
            super().__exit__(*error)
            torch.cuda.current_stream().wait_stream(self.stream)

    return Side(torch.cuda.Stream())


@step(2, on_cuda(draw_write))
@torch.no_grad()
def write_on_stream(subject, target, view, op, number, seed):
    with on_side_stream():
        WRITES[op](through(subject.tensor(target), view), number, seed)


@step(1.5, on_cuda(lambda d: {"seed": d.seed()}), reads=True)
@torch.no_grad()
def evaluate_on_stream(subject, seed):
    """Gathers, and flushes if need be, on another stream than that of the writes."""
    with on_side_stream():
        return output_of(subject, seed).clone()


def draw_graph(d):
    if d.setup.sharded:
        return None
    return {
        "layer": draw_layer(d),
        "op": d.choice(("mul_", "add_", "fill_", "zero_", "clamp_")),
        "number": d.choice((0.5, 0.75, -1.0)),
        "replays": d.choice((0, 1, 3)),
        "forward": d.chance(0.5),
        "seed": d.seed(),
    }


@step(1.5, on_cuda(draw_graph), reads=True)
@torch.no_grad()
def replay_graph(subject, layer, op, number, replays, forward, seed):
    """A write in a CUDA graph, perhaps before a forward in it; the graph is replayed, and then gone. A
    twin leaves the forward out: it looks at its peer's state."""
    weight = subject.tensor(f"w{layer}")
    WRITES[op](weight, number, seed)  # kernels are loaded, and workspaces made, outside of graphs
    output = output_of(subject, seed)
    yield output.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    x = torch.ones_like(output_input(subject))
    with torch.cuda.graph(graph):
        WRITES[op](weight, number, seed)
        output = subject.model(x) if forward and subject.quantized else None
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    del output


def output_input(subject):
    layer = subject.setup.layers[0]
    return torch.empty(4, layer.cols, device="cuda", dtype=subject.setup.dtype)


def draw_copy_over(d):
    return {
        "layer": draw_layer(d),
        "op": d.choice(SIMPLE_WRITES),
        "number": d.number(),
        "seed": d.seed(),
        "pinned": d.chance(0.7),
        "into": d.new_register(),
    }


@step(2, on_cuda(draw_copy_over), reads=True)
@torch.no_grad()
def copy_over(subject, layer, op, number, seed, pinned, into):
    """To the host and back without blocking; what is copied is written while copies are under way."""
    weight = subject.tensor(f"w{layer}")
    host = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=pinned)
    host.copy_(weight, non_blocking=True)
    copied = weight.to("cpu", non_blocking=True)
    WRITES[op](weight, number, seed)
    torch.cuda.synchronize()
    subject.keep(into, weight.clone())
    yield {"host": host.to(weight.device), "copy": copied.to(weight.device)}
    weight.copy_(host, non_blocking=True)
    yield
    back = host.to(weight.device, non_blocking=True)
    yield {"back": back}
