"""Random programs on quantized models beside plain twins (random_programs.py): no difference, no hang.

Here a few hundred of them; `python random_programs.py --programs 10000` runs more.
"""

import time

import pytest
import torch
from dist_helpers import World, on_worlds
from program_steps import KINDS, Step, step
from program_tensor_steps import window
from random_programs import Program, make_program, run_on

PROGRAMS = {1: 200, 2: 100, 3: 40}  # by ranks


@on_worlds(*PROGRAMS)
def test_programs_equal_their_plain_twins(world, report):
    count, start = PROGRAMS[world.size], time.monotonic()
    programs = [make_program(seed, world.size, world.device) for seed in range(count)]
    findings, stops, endings = run_on(world, programs)
    report.append(
        f"random programs: {count} on {world}, {len(findings)} differences, {len(stops)} stops, "
        f"{time.monotonic() - start:.0f} s, seeds 0..{count - 1}"
    )
    assert not findings and not stops, "\n" + "\n\n".join(map(str, [*findings, *stops]))
    never_done = {name for name, ending in endings if ending == "done"} ^ {n for n, _ in endings}
    assert all(name.startswith("fail") for name in never_done), never_done


def test_programs_depend_on_seed_and_world_alone():
    assert str(make_program(7, 2)) == str(make_program(7, 2))
    assert len({str(make_program(seed, size)) for seed in range(5) for size in (1, 2)}) == 10
    drawn = {s.name for seed in range(300) for s in make_program(seed, 1).steps}
    assert drawn >= set(KINDS) - {"write_ours_alone", "hang"}


@step(0)
@torch.no_grad()
def write_ours_alone(subject):
    if subject.quantized:
        window(subject, "w0", ()).add_(1)


@step(0)
def hang(subject):
    if subject.quantized and torch.distributed.get_rank() == 1:
        torch.distributed.all_reduce(torch.ones(3))


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
