"""Checks that the pictures of streams show the order of the log, and that the checked-in pictures are up to date."""

from __future__ import annotations

import itertools

import pytest
import torch

from spec_tests.harness import device, rank_among_fake_ranks, simulated
from spec_tests.harness.accounting import ROOT
from spec_tests.streams import blocks, order, pictures, steps, timelines
from spec_tests.streams.steps import Moment, Step


def step_of(api: str = "wrapper") -> Step:
    make = {"wrapper": blocks.flat, "function": blocks.per_parameter}[api]
    return steps.recorded(make(3), torch.randn(3, blocks.WIDTH, device=device()))


@pytest.mark.spec("SIM-11")
@rank_among_fake_ranks(pictures.NUM_RANKS)
def test_pictures_in_the_docs_equal_those_of_the_current_engine() -> None:
    written = {path.stem: path.read_text(encoding="utf-8") for path in pictures.FOLDER.glob("*.svg")}
    stale = sorted(name for name, text in pictures.drawn() if written.pop(name, None) != text)
    assert not stale, "if the new order is meant: python -m spec_tests.streams.pictures"
    assert not written, "these pictures are not used"


@pytest.mark.spec("SIM-03")
@rank_among_fake_ranks(2)
def test_docs_example_of_race_gives_printed_report() -> None:
    page = (ROOT / "docs" / "streams.md").read_text(encoding="utf-8")
    program, report = (page.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "text"))
    module = torch.get_device_module(device())
    gather_stream = module.Stream()
    gather_stream.name = "gather stream"
    weight, arrived, x = (torch.zeros(8, 8, device=device()) for _ in range(3))
    gather_stream.wait_stream(module.current_stream())
    names = {"device": module, "gather_stream": gather_stream, "weight": weight, "arrived": arrived, "x": x}
    exec(program.replace("torch.cuda", "device"), names)
    (race,) = simulated.WORLD.races.values()
    assert str(race) == report.strip()
    simulated.WORLD.races.clear()
    # With the wait that the page recommends, there is no race.
    gather_stream.wait_stream(module.current_stream())
    copy, product = program.rsplit("\n", 2)[:2]
    wait = "torch.cuda.current_stream().wait_stream(gather_stream)"
    assert f"`{wait}`" in page
    exec(f"{copy}\n{wait}\n{product}\n".replace("torch.cuda", "device"), names)


@pytest.mark.spec("SIM-11")
@rank_among_fake_ranks(4)
def test_arrows_and_columns_contain_the_order_of_the_log() -> None:
    step = step_of()
    boxes = [moment for moment in step.moments if moment.kind != "FREE"]
    steps_on: dict[Moment, list[Moment]] = {box: [] for box in boxes}
    for one, other in order.arrows(boxes):
        steps_on[one].append(other)
    for row in steps.ROWS:
        of_row = [box for box in boxes if box.row == row]
        for one, other in itertools.pairwise(of_row):
            steps_on[one].append(other)
    column = order.columns(boxes, step.order)

    def reaches(one: Moment, other: Moment) -> bool:
        return any(box is other or reaches(box, other) for box in steps_on[one])

    for one in boxes:
        for other in boxes:
            assert reaches(one, other) is one.is_before(other)
            assert not (one.is_before(other) and column[one] >= column[other])


@pytest.mark.spec("SIM-11")
@rank_among_fake_ranks(4)
def test_a_timeline_keeps_every_wait_of_the_log() -> None:
    step = pictures.wide()
    run = timelines.played(step)
    for place, (operation, (start, end)) in enumerate(zip(step.operations, run.ran, strict=True)):
        assert run.launched[place] < start < end
        for earlier, (_, earlier_end) in zip(step.operations[:place], run.ran, strict=False):
            assert earlier_end <= start or not earlier.is_before(operation)
    # The CPU only continues when the operation that it waits for has ended.
    (begun, ended), *_ = run.stops.values()
    first_forward = next(moment for moment in step.moments if moment.name == "F0")
    assert begun < ended == run.ran[first_forward.places[-1]][1]
