"""Random programs on quantized models beside plain twins (random_programs.py): no difference, no hang.

Here a few hundred of them; `python random_programs.py --programs 10000` runs more.
"""

import random
import time
from collections import Counter

import pytest
import torch
from dist_helpers import World, on_worlds
from helpers import ops
from program_files import SAVED, Program, load_program, make_program, save_program
from program_known import KNOWN, kind_of, without_known
from program_models import Layer, TwinLinear
from program_steps import KINDS, Step, step
from program_tensor_steps import window
from program_values import difference
from random_programs import call, run_on

BUDGET_S = 210
PROGRAMS = {1: 100, 2: 40, 3: 15, 4: 8}  # by ranks


@on_worlds(*PROGRAMS)
def test_programs_equal_their_plain_twins(world, report):
    count, start = PROGRAMS[world.size], time.monotonic()
    programs = [without_known(make_program(seed, world.size, world.device)) for seed in range(count)]
    findings, stops, endings = run_on(world, programs)
    report.append(
        f"random programs: {count} on {world}, {len(findings)} differences, {len(stops)} stops, "
        f"{time.monotonic() - start:.0f} s, seeds 0..{count - 1}"
    )
    if world.device == "cpu" and world.size == 1:
        report += [f"left out of random programs: {known}" for known in KNOWN]
    assert not findings and not stops, "\n" + "\n\n".join(map(str, [*findings, *stops]))
    tried = Counter()
    for (name, _), times in endings.items():
        tried[name] += times
    # A kind of step that a few programs have may be one that cannot be done there.
    never_done = {name for name, times in tried.items() if times >= 5 and not endings[name, "done"]}
    assert all(name.startswith("fail") for name in never_done), never_done


def test_programs_depend_on_seed_and_world_alone():
    assert str(make_program(7, 2)) == str(make_program(7, 2))
    assert len({str(make_program(seed, size)) for seed in range(5) for size in (1, 2)}) == 10
    drawn = {s.name for seed in range(300) for s in make_program(seed, 1, "cuda").steps}
    assert drawn >= {name for name, kind in KINDS.items() if kind.weight > 0}


@pytest.mark.parametrize("size", [1, 2])
def test_programs_are_the_same_in_files(size, tmp_path):
    for seed in range(50):
        program = make_program(seed, size, "cuda")
        save_program(program, tmp_path / "program.json", "cuda")
        assert load_program(tmp_path / "program.json") == (program, "cuda")


def test_saved_programs_can_be_read():
    for file in SAVED.glob("*.json"):
        program, device = load_program(file)
        assert device in ("cpu", "cuda")
        assert {step.name for step in program.steps} <= KINDS.keys()


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.kind)
def test_what_is_known_to_differ_does(known):
    """A change that cures a kind takes it out of the table. The file stays, as a program that passes."""
    program, device = load_program(SAVED / f"{known.file}.json")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU: ranks on the CPU do not show it")
    assert kind_of(program) == known.kind
    findings, _, _ = run_on(World(device, program.ranks), [program], shrinks=False)
    assert findings, f"{known.kind} differs no more: take it out of program_known.py"


def test_saved_programs_pass_but_for_what_is_known():
    of_known = {known.file for known in KNOWN}
    for file in sorted(SAVED.glob("*.json")):
        program, device = load_program(file)
        if file.stem in of_known or (device == "cuda" and not torch.cuda.is_available()):
            continue
        findings, stops, _ = run_on(World(device, program.ranks), [program], shrinks=False)
        assert not findings and not stops, "\n" + "\n\n".join(map(str, [*findings, *stops]))


def test_a_twin_multiplies_by_its_values():
    """A block with a subnormal scale, quantized again, has other values."""
    values = torch.cat([torch.ones(1), torch.full((31,), 7e-6)]).unsqueeze(1)
    first = ops.quantize(values, "nvfp4_1x16")
    shown = ops.dequantize(first)
    assert difference(ops.dequantize(ops.quantize(shown, "nvfp4_1x16")), shown)
    peer, twin = torch.nn.Linear(1, 32, bias=False), TwinLinear(1, 32, bias=False)
    peer.weight = torch.nn.Parameter(first)
    twin.belong_to(peer, Layer(32, 1, "nvfp4_1x16", keep_master=False, bias=False))
    twin.note_state()
    twin.note_rounded(first)
    with torch.no_grad():
        twin.weight.copy_(shown)
        assert difference(ops.dequantize(twin.quantized(twin.weight)), twin.weight.detach()) is None
        twin.weight.mul_(2)  # its own write: nothing is known of that
        assert twin.quantized(twin.weight) is not first


@step(0)
def leave_traces(subject):
    """What a program must not see of those before it."""
    torch.full((1 << 20,), 3.0)
    torch.manual_seed(7)
    random.seed(7)


@step(0)
def see_traces(subject):
    """The twin is given what ours saw: it is no difference, but in the digest."""
    if subject.quantized:
        memory = torch.empty(1 << 20).nan_to_num(-1.0)[64:1000]
        numbers = torch.tensor([random.random(), torch.rand(()).item()])
        subject.seen = subject.twin.seen = torch.cat([memory, numbers])
    subject.keep("r1", subject.seen.clone())


@pytest.mark.parametrize("size", [1, 2])
def test_a_program_is_the_same_alone_and_after_others(size):
    world = World("cpu", size)
    programs = [
        *(without_known(make_program(seed, size)) for seed in range(1000, 1008)),
        of_steps(1, size, "leave_traces"),
        of_steps(2, size, "see_traces"),
    ]
    together = digests(world, programs)
    assert len(set(together)) == len(programs)
    alone = []
    for program in programs[-3:] + programs[:1]:
        world.outcomes(end_process)
        alone += digests(world, [program])
    assert alone == together[-3:] + together[:1]


def of_steps(seed, size, *names):
    setup = make_program(seed, size).setup
    return Program(seed, size, setup, tuple(Step(name, {}) for name in names))


def digests(world, programs):
    world.run(import_this_module)
    results, stop = call(world, programs, shrinks=False)
    assert not stop and not any(result.finding for result in results), (results, stop)
    return [result.digest for result in results]


def end_process():
    """The next job runs in a new one."""
    raise SystemExit


@step(0)
@torch.no_grad()
def write_ours_alone(subject):
    if subject.quantized:
        window(subject, "w0", ()).add_(1)


@step(0)
def hang(subject):
    if subject.quantized and torch.distributed.get_rank() == 1:
        torch.distributed.recv(torch.ones(3), src=0)


def sabotaged(world, name):
    """A program with a step that goes wrong between others."""
    program = make_program(3, world.size)
    steps = [s for s in program.steps if s.name in ("write", "train", "flush")][:4]
    steps.insert(len(steps) // 2, Step(name, {}))
    return Program(3, world.size, program.setup, tuple(steps))


@pytest.mark.parametrize("size", [1, 2])
def test_a_difference_is_found_and_shrunk(size):
    world = World("cpu", size)
    world.run(import_this_module)
    findings, stops, _ = run_on(world, [sabotaged(world, "write_ours_alone")])
    assert not stops
    assert [s.name for s in findings[0].shortest.steps] == ["write_ours_alone"]
    assert "layers.0.weight" in findings[0].shortest_difference.text


def test_a_hang_is_found():
    world = World("cpu", 2)
    world.run(import_this_module)
    findings, stops, _ = run_on(world, [sabotaged(world, "hang")], shrinks=False)
    assert not findings
    assert stops[0].is_hang() and "hang" in stops[0].step


def import_this_module():
    """Registers its steps on the ranks."""
