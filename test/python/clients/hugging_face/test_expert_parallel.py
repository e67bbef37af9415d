"""ep_implementation="qshard" of transformers on two ranks: tokens travel in codes."""

import warnings

import pytest
import torch
import torch.distributed as dist
from collective_calls import ExchangedRows
from dist_helpers import device, full_mesh, on_ranks

import qshard

pytest.importorskip("transformers", "5.23", reason="needs transformers >= 5.23")
import qshard.integrations.transformers  # noqa: E402, F401 registers "qshard"
from moe_models import make_model, tokens  # noqa: E402
from transformers.distributed.expert_parallel import apply_expert_parallelism  # noqa: E402

from qshard.experts import transformers_parallel  # noqa: E402


def experts_of(model):
    return {name: m for name, m in model.named_modules() if "down_proj" in m._parameters}


def in_parallel(name, implementation, ep, tp=1, experts="qshard", format="mxfp8", **options):
    """A model whose experts lie on `ep` ranks, of which `tp` have the same batch."""
    model = make_model(name, experts).to(device())
    modules = experts_of(model)
    plan = {f"{module}.{stack}": "grouped_gemm" for module in modules for stack in modules[module]._parameters}
    plan.update(dict.fromkeys(modules, "ep_dispatch_experts"))
    ep_mesh = full_mesh(ep, names=("ep",))
    tp_mesh = full_mesh(ep // tp, tp, names=("data", "tp"))["tp"]
    apply_expert_parallelism(model, ep_mesh, tp_mesh, plan, implementation)
    qshard.quantize_(model, format, filter_fn=lambda m, n: n in modules, tp_mesh=ep_mesh, **options)
    return model


def trained(model, tp=1):
    """Losses of two steps of SGD, each rank with a batch of its own."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(2):
        ids = tokens(2 * step + dist.get_rank() // tp).to(device())
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name, tp", [("gpt_oss", 1), ("qwen3_moe", 2)])
@on_ranks(2, devices=("cpu",))
def test_tokens_travel_in_codes_beside_those_that_travel_as_values(name, tp):
    results = []
    for implementation in ("all_to_all", "qshard"):
        model = in_parallel(name, implementation, 2, tp)
        with ExchangedRows() as sent:
            results.append(trained(model, tp))
        in_codes = implementation == "qshard"
        assert len(sent.in_codes()) == 2 * 2 * len(experts_of(model)) * in_codes
        assert (qshard.report(model).sent().tokens > 0) == in_codes
        assert all(qshard.is_quantized(m.down_proj) for m in experts_of(model).values())
        with torch.no_grad(), ExchangedRows() as sent:
            model(tokens(9).to(device()))
        assert bool(sent.in_codes()) == (in_codes and tp == 1)  # ranks of one batch exchange none
    assert results[0] != results[1]
    torch.testing.assert_close(torch.tensor(results[1]), torch.tensor(results[0]), rtol=5e-3, atol=0)


@on_ranks(2, devices=("cpu",))
def test_experts_that_multiply_values_get_values():
    transformers_parallel._warn_of_values.cache_clear()
    model = in_parallel("qwen3_moe", "qshard", 2, experts="grouped_mm")
    with ExchangedRows() as sent, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(model)
    assert not sent.in_codes()
    assert len([w for w in caught if 'call model.set_experts_implementation("qshard")' in str(w.message)]) == 1
    model = in_parallel("qwen3_moe", "qshard", 2, weight_only=True)
    with ExchangedRows() as sent:
        trained(model)
    assert not sent.in_codes() and torch.float32 in sent.dtypes()
