"""CUDA graphs: a captured training step, replayed on new inputs, equals eager steps bit for bit."""

import copy

import pytest
import torch
import torch.nn.functional as F

import qshard

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ops = torch.ops.qshard
RECIPES = (
    qshard.Float8CurrentScaling(),
    qshard.DelayedScaling(),
    qshard.Float8BlockScaling(),
    qshard.MXFP8BlockScaling(),
    qshard.NVFP4BlockScaling(),
)
OPTIONS = ({}, {"keep_master": False}, {"keep_master": False, "stochastic_rounding": True})


class Training:
    """A small model with its optimizer, and the buffers that its inputs are put into."""

    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, capturable=True)
        self.x = torch.zeros(96, 256, device="cuda", dtype=torch.bfloat16)
        self.target = torch.zeros(96, 64, device="cuda")

    def take(self, batch):
        self.x.copy_(batch[0])
        self.target.copy_(batch[1])

    def step(self):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(self.x).float(), self.target)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def steps(self, batches):
        losses = []
        for batch in batches:
            self.take(batch)
            losses.append(self.step())
        return losses

    def capture(self):
        """The graph of a step, and the loss that each replay overwrites."""
        self.optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self.step()
        return graph, loss


def build(recipe, options):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 384), torch.nn.GELU(), torch.nn.Linear(384, 64)]
    return qshard.quantize_(torch.nn.Sequential(*layers).cuda(), recipe, **options)


def make_batches(count):
    return [[torch.randn(96, cols, device="cuda") for cols in (256, 64)] for _ in range(count)]


def assert_same_state(captured, eager):
    for (name, tensor), other in zip(
        captured.model.state_dict().items(), eager.model.state_dict().values()
    ):
        if qshard.is_quantized(tensor):
            for plane in (ops.codes, ops.scale_inv):
                mine, theirs = (plane(t).contiguous().view(torch.uint8) for t in (tensor, other))
                assert torch.equal(mine, theirs), (name, plane)
        assert torch.equal(tensor + 0, other + 0), name
    for mine, theirs in zip(captured.optimizer.state.values(), eager.optimizer.state.values()):
        for key, value in mine.items():
            assert torch.equal(value, theirs[key]), key


@pytest.mark.parametrize("options", OPTIONS, ids=["master", "no_master", "stochastic"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.format)
def test_replayed_steps_equal_eager_ones(recipe, options):
    model = build(recipe, options)
    captured, eager = Training(model), Training(copy.deepcopy(model))
    batches = make_batches(8)
    warm_up, rest = batches[:3], batches[3:]

    side = torch.cuda.Stream()  # as torch.cuda.graph wants it: warm up off the default stream
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        captured.steps(warm_up)
    torch.cuda.current_stream().wait_stream(side)
    eager.steps(warm_up)

    graph, loss = captured.capture()
    losses = []
    for batch in rest:
        captured.take(batch)
        graph.replay()
        losses.append(loss.clone())
    expected = eager.steps(rest)
    assert [value.item() for value in losses] == [value.item() for value in expected]
    assert len({value.item() for value in losses}) == len(rest)  # each replay saw its own batch
    assert_same_state(captured, eager)
