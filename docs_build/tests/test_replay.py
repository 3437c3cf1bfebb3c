"""The replay of recorded events with another network: cases computed by hand, and all recorded runs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from docs_build.reading.order import ROOT as CHECKOUT
from docs_build.recording import recordings
from docs_build.tests.browser import Tab
from minifsdp_tools.cost import Job, sent_bytes

pytestmark = pytest.mark.docs

SCRIPT = CHECKOUT / "docs" / "assets" / "js" / "replay.js"
SETTINGS = {"bandwidth": 1e5, "latency": 0.0, "speed": 1e6, "rows": 10, "size": 1, "width": 4}
SETTINGS |= {"shards": 2, "replicas": 1, "ahead": False}
STREAMS = ("compute", "gather", "reduce", "all_reduce")
# The model of the recorded runs.
BLOCK = [(128, 64), (128,), (64, 128), (64,)]
ROOT = [(64, 16), (64,), (1, 64), (1,)]


@pytest.fixture
def page(tab: Tab) -> Tab:
    """An empty page with the script."""
    tab.open("about:blank")
    tab.page.add_script_tag(path=SCRIPT)
    return tab


def moments_of(words: str, num_bytes: int = 4000, ranks: int = 2) -> list[dict[str, Any]]:
    """Moments from words: ``AG0`` begins an all-gather of unit 0, ``/AG0`` ends it."""
    found = []
    for word in words.split():
        name = word.removeprefix("/")
        kind, unit = name[:-1], int(name[-1])
        group = list(range(ranks)) if kind in ("AG", "RS", "AR") else []
        found.append({"kind": kind, "unit": unit, "begins": name == word, "bytes": num_bytes, "group": group})
    return found


def replayed(page: Tab, moments: list[dict[str, Any]], **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A replay, and its spans in milliseconds, such as ``{"AG0": (0, 20)}``."""
    given = json.dumps([moments, [{"bytes": 4000}] * 4, {**SETTINGS, **changes}])
    found = page.look(f"minifsdpReplay.replay(...{given})")
    spans = {f"{span['kind']}{span['unit']}": (span["from"], span["to"]) for span in found["spans"]}
    return found, {name: (round(1e3 * a, 6), round(1e3 * b, 6)) for name, (a, b) in spans.items()}


ONE_UNIT = "AG0 /AG0 F0 /F0 B0 /B0 RS0 /RS0"


@pytest.mark.spec("SLIDERS-01")
def test_one_unit_takes_the_time_computed_by_hand(page: Tab) -> None:
    # All-gather: 4000 bytes * 1/2 / 1e5. Forward: 2 * 10 rows * 1000 parameters / 1e6.
    found, spans = replayed(page, moments_of(ONE_UNIT))
    assert spans == {"AG0": (0, 20), "F0": (20, 40), "B0": (40, 80), "RS0": (80, 100)}
    assert [found[key] for key in ("step", "computation", "exposed")] == pytest.approx([0.1, 0.06, 0.04])
    assert found["sent"] == {"AG": 2000, "RS": 2000, "AR": 0}


@pytest.mark.spec("SLIDERS-01")
@pytest.mark.parametrize(
    ("changes", "gather", "forward"),
    [
        ({"bandwidth": 1e4}, 200, 20),
        ({"latency": 0.003}, 23, 20),
        ({"speed": 2e6}, 20, 10),
        ({"rows": 30}, 20, 60),
        ({"size": 3}, 60, 60),
        ({"width": 2}, 10, 20),
        ({"shards": 4, "latency": 0.001}, 33, 20),
    ],
)
def test_each_setting_changes_its_own_part(page: Tab, changes: dict[str, Any], gather: float, forward: float) -> None:
    _, spans = replayed(page, moments_of(ONE_UNIT), **changes)
    assert spans["AG0"] == (0, gather)
    assert spans["F0"] == (gather, gather + forward)
    assert spans["RS0"][1] - spans["RS0"][0] == pytest.approx(gather)


@pytest.mark.spec("SLIDERS-01")
def test_prefetched_all_gather_runs_during_computation_and_the_thread_waits_for_the_rest(page: Tab) -> None:
    words = "AG0 /AG0 AG1 F0 /F0 FREE0 /AG1 F1 /F1"
    _, spans = replayed(page, moments_of(words))
    assert spans == {"AG0": (0, 20), "AG1": (20, 40), "F0": (20, 40), "F1": (40, 60)}
    # With half of the bandwidth, 20 of the 40 ms of the second all-gather are exposed.
    found, spans = replayed(page, moments_of(words), bandwidth=5e4)
    assert spans == {"AG0": (0, 40), "AG1": (40, 80), "F0": (40, 60), "F1": (80, 100)}
    assert found["exposed"] == pytest.approx(0.06)
    # Collectives of one stream run one after the other.
    _, spans = replayed(page, moments_of("AG0 AG1 RS2 RS3 /AG1 /RS3"))
    assert spans == {"AG0": (0, 20), "AG1": (20, 40), "RS2": (0, 20), "RS3": (20, 40)}


@pytest.mark.spec("SLIDERS-01")
def test_all_reduce_sends_a_shard_twice_and_follows_its_reduce_scatter(page: Tab) -> None:
    moments = moments_of("B0 /B0 RS0 /RS0") + moments_of("AR0 /AR0", num_bytes=2000, ranks=3)
    # 2000 bytes * 2/3, twice, / 1e5. With 4 shards, the reduce-scatter sends 3/4 of 4000 bytes, and a shard has half.
    assert replayed(page, moments, replicas=3)[1]["AR0"] == pytest.approx((60, 60 + 80 / 3))
    assert replayed(page, moments, replicas=3, shards=4)[1]["AR0"] == pytest.approx((70, 70 + 40 / 3))


@pytest.mark.spec("SLIDERS-02")
def test_device_gathers_during_computation_until_the_rate_limiter_stops_it(page: Tab) -> None:
    words = " ".join(f"AG{n} /AG{n} F{n} /F{n} FREE{n}" for n in range(4))
    assert replayed(page, moments_of(words))[1]["F3"] == (140, 160)
    _, found = replayed(page, moments_of(words), ahead=True, speed=5e5)
    # Forward takes 40 ms. The third all-gather is issued after the first reshard, at 60 ms.
    assert [found[f"AG{n}"] for n in range(4)] == [(0, 20), (20, 40), (60, 80), (100, 120)]
    assert [found[f"F{n}"] for n in range(4)] == [(20, 60), (60, 100), (100, 140), (140, 180)]


def recorded(page: Tab, key: str) -> tuple[str, str, dict[str, Any]]:
    """The moments of the first rank of a recorded run, and its units, as JSON; and the sizes of its groups."""
    run = recordings.find(key)
    names = [unit["name"] for unit in run["units"]]
    found = []
    for kind, unit, begins, _, size, group, *_ in run["ranks"][0]["moments"]:
        place = -1 if kind == "STEP" else names.index(unit)
        found.append({"kind": kind, "unit": place, "begins": begins, "bytes": size, "group": group})
    moments = json.dumps(found)
    return moments, json.dumps(run["units"]), page.look(f"minifsdpReplay.groupsOf({moments})")


@pytest.mark.spec("SLIDERS-03")
def test_every_recorded_run_is_between_the_bounds(page: Tab) -> None:
    keys = sorted(key for key, run in recordings.load()["runs"].items() if run["run"]["width"] <= 64)
    assert len(keys) > 70
    for key in keys:
        moments, units, groups = recorded(page, key)
        settings = json.dumps({**SETTINGS, "speed": 1e10, "rows": 32, **groups})
        code = """((moments, units, settings) => [1e6, 1e8, 1e15].flatMap((bandwidth) => [false, true].map((ahead) =>
            minifsdpReplay.replay(moments, units, { ...settings, bandwidth, ahead }))))"""
        found = page.look(f"{code}({moments}, {units}, {settings})")
        steps = [one["step"] for one in found]
        # A faster network is never slower, and running ahead is never slower than waiting.
        assert steps[0] >= steps[2] >= steps[4], key
        assert all(ahead <= waits * (1 + 1e-9) for waits, ahead in zip(steps[::2], steps[1::2], strict=True)), key
        # With no time for the network, only computation remains.
        assert steps[4] == pytest.approx(found[4]["computation"], rel=1e-3), key
        for one in found:
            busy = [sum(s["to"] - s["from"] for s in one["spans"] if s["stream"] == kind) for kind in STREAMS]
            assert max(busy) * (1 - 1e-9) <= one["step"] <= sum(busy) * (1 + 1e-9), key


@pytest.mark.spec("SLIDERS-03")
@pytest.mark.parametrize(
    ("key", "choices"),
    [
        ("fsdp1-zero2-pre-block-4", {"strategy": "SHARD_GRAD_OP", "num_shards": 4}),
        ("fsdp1-none-pre-block-4", {"strategy": "NO_SHARD", "num_replicas": 4}),
        ("fsdp2-hybrid2-pre-block-4", {"strategy": "_HYBRID_SHARD_ZERO2", "num_shards": 2, "num_replicas": 2}),
        ("fsdp2-full-pre-block-4", {"num_shards": 4}),
        ("fsdp2-keep2-pre-block-4", {"num_shards": 4, "reshards_to": 2}),
    ],
)
def test_sent_bytes_of_a_recorded_run_are_those_of_the_calculator(page: Tab, key: str, choices: dict[str, Any]) -> None:
    moments, units, groups = recorded(page, key)
    found = page.look(f"minifsdpReplay.replay({moments}, {units}, {json.dumps({**SETTINGS, **groups})}).sent")
    # The run with `reshards_to` gives the setting to the root as well, which is then a unit like the others.
    blocks, root = ([*[BLOCK] * 4, ROOT], []) if "reshards_to" in choices else ([BLOCK] * 4, ROOT)
    job = Job(units=blocks, root=root, per_parameter=key.startswith("fsdp2"), **choices)
    assert found == pytest.approx(sent_bytes(job))
