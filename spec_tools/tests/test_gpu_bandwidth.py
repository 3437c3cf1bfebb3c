"""The stage ``bandwidth`` of the GPU kit: sizes, times, checks of values, limits of memory, and expected figures."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.harness import ranks, simulated
from spec_tools.gpu import bandwidth, bandwidth_table, stages
from spec_tools.gpu.cards import CARDS, find_card
from spec_tools.gpu.chunks import run_chunk
from spec_tools.gpu.platforms import CPU, CUDA, SIMULATED, Platform

NO_NEW_NAMES = "ignore:.*is deprecated. Please use:FutureWarning"  # torch 2.13 has newer names for its collectives
H100 = "NVIDIA H100 80GB HBM3"


def measured(collective: str, dtype: str = "bfloat16", elements: int = 1000, most: int = 1) -> dict[str, Any]:
    """The row of one size."""
    (row,) = bandwidth.measure("cpu", collective, dtype, [("", elements)], 1 << 24, most)
    return row


@pytest.mark.spec("KIT-16")
@pytest.mark.filterwarnings(NO_NEW_NAMES)
@pytest.mark.parametrize("dtype", bandwidth.DTYPES)
@pytest.mark.parametrize("collective", bandwidth.COLLECTIVES)
@ranks(2)
def test_both_collectives_have_times_and_no_wrong_values(collective: str, dtype: str) -> None:
    row = measured(collective, dtype, elements=2 * bandwidth.BLOCK + 3)
    itemsize = 4 if dtype == "float32" else 2
    assert row["count"] == bandwidth.BLOCK + 2  # 3 elements and one of padding
    assert row["bytes"] == 2 * row["count"] * itemsize
    assert row["memory"] == (3 * row["count"] + 2 * bandwidth.BLOCK) * itemsize
    assert row["wrong"] == 0
    assert len(row["us"]) == len(row["host us"]) >= bandwidth.FEWEST_CALLS
    assert min(row["us"] + row["host us"]) > 0


def swaps(whole: Tensor, shard: Tensor) -> None:
    """An all-gather with the shards in the wrong order."""
    dist.all_gather_into_tensor(whole, shard)
    whole.copy_(torch.cat(whole.chunk(2)[::-1]))


def moves(whole: Tensor, shard: Tensor) -> None:
    """An all-gather with one piece at the position of another."""
    dist.all_gather_into_tensor(whole, shard)
    whole[64:128] = whole[:64].clone()


def changes_one(whole: Tensor, shard: Tensor) -> None:
    """A reduce-scatter with one wrong bit on one rank."""
    dist.reduce_scatter_tensor(shard, whole)
    shard[-1] += dist.get_rank()


def adds_one_rank(whole: Tensor, shard: Tensor) -> None:
    """A reduce-scatter without the values of the other rank."""
    shard.copy_(whole.chunk(2)[dist.get_rank()])


def does_nothing(whole: Tensor, shard: Tensor) -> None:
    """The target keeps its values."""


# The collective, how it is broken, and the wrong values that both ranks find in 1000 elements and three checks.
BROKEN = (
    ("all-gather", swaps, 2 * 3 * 1000),
    ("all-gather", moves, 2 * 3 * 64),
    ("all-gather", does_nothing, 2 * 3 * 1000),
    ("reduce-scatter", changes_one, 3),
    # Values of the other rank are zero at every seventh element.
    ("reduce-scatter", adds_one_rank, None),
    ("reduce-scatter", does_nothing, 2 * 3 * 500),
)


@pytest.mark.spec("KIT-16")
@pytest.mark.filterwarnings(NO_NEW_NAMES)
@pytest.mark.parametrize("case", range(len(BROKEN)), ids=[how.__name__ for _, how, _ in BROKEN])
@ranks(2)
def test_wrong_values_of_a_broken_collective_are_counted(case: int) -> None:
    collective, broken, expected = BROKEN[case]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(bandwidth.COLLECTIVES, collective, broken)
        found = torch.tensor([measured(collective)["wrong"]])
    dist.all_reduce(found)
    if expected is None:
        assert 2 * 3 * 400 < int(found) < 2 * 3 * 450
    else:
        assert int(found) == expected


@pytest.mark.spec("KIT-16")
def test_wrong_values_fail_the_finding() -> None:
    row = {"what": "", "bytes": 2000, "count": 500, "memory": 9, "us": [1.0], "host us": [1.0], "wrong": 0}
    about = {"collective": "all-gather", "dtype": "float32", "ranks": 2}
    good = bandwidth.finding_of(about, [[row, row], [row, row]])
    assert (good["outcome"], len(good["rows"])) == ("passed", 2)
    bad = bandwidth.finding_of(about, [[row, row], [row, {**row, "wrong": 3}]])
    assert (bad["outcome"], bad["rows"][1]["wrong"]) == ("failed", 3)
    assert bad["text"] == "all-gather of float32 on 2 ranks: 3 wrong values of 2000 bytes"


@pytest.mark.spec("KIT-16")
def test_sums_of_the_pattern_are_exact_in_bfloat16() -> None:
    assert [bandwidth.period(n) for n in (1, 8, 42, 43, 64, 128, 256)] == [7, 7, 7, 5, 5, 3, 2]
    for num_ranks in (2, 8, 42, 64, 128, 256):
        largest = bandwidth.period(num_ranks) - 1
        total = torch.zeros(1, dtype=torch.bfloat16)
        for _ in range(num_ranks):
            total += largest
        assert int(total) == num_ranks * largest


@pytest.mark.spec("KIT-16")
def test_each_call_has_the_time_of_its_slowest_rank() -> None:
    row = {"what": "x", "bytes": 8_000_000, "count": 1, "memory": 9, "wrong": 0}
    fast = {**row, "us": [10.0, 30.0, 50.0], "host us": [60.0, 60.0, 90.0]}
    slow = {**row, "us": [20.0, 20.0, 60.0], "host us": [70.0, 70.0, 70.0]}
    found = bandwidth._joined([fast, slow])
    assert found["us"] == [20.0, 30.0, 60.0]
    assert found["host us"] == [70.0, 70.0, 90.0]
    # 8e6 bytes in 30e-6 seconds; two ranks, so half of it is on the link.
    assert (found["algbw"], found["busbw"]) == (266.67, 133.33)


@pytest.mark.spec("KIT-16")
def test_sizes_are_powers_of_two_and_units_of_known_models() -> None:
    sizes = bandwidth.plan(CUDA.largest, False, torch.bfloat16)
    assert [elements * 2 for name, elements in sizes if not name] == [1 << power for power in range(16, 31)]
    assert [name for name, _ in sizes if name] == list(bandwidth.UNITS)
    assert [elements * 4 for name, elements in bandwidth.plan(CUDA.largest, True, torch.float32) if not name] == [
        1 << 20,
        1 << 24,
        1 << 28,
    ]
    with torch.device("meta"):
        gpt2 = nn.TransformerEncoderLayer(768, 12, 3072)  # the same parameters as a block of GPT-2
        shapes = [(4096, 4096)] * 4 + [(4096, 11008)] * 3
        llama = nn.ModuleList([nn.Linear(*shape, bias=False) for shape in shapes] + [nn.RMSNorm(4096)] * 2)
    assert bandwidth.UNITS["GPT-2 block"] == sum(p.numel() for p in gpt2.parameters())
    assert bandwidth.UNITS["Llama 7B block"] == sum(p.numel() for p in llama[:7].parameters()) + 2 * 4096


# ---- memory ---------------------------------------------------------------------------------------------------------


class LittleMemory(Platform):
    """One rank has 8 MB of free memory, and the other 80 MB."""

    def free_memory(self) -> int:
        return 8_000_000 if dist.get_rank() == 1 else 80_000_000


@pytest.mark.spec("KIT-16")
@pytest.mark.filterwarnings(NO_NEW_NAMES)
@ranks(2)
def test_sizes_that_do_not_fit_on_one_rank_are_skipped_on_all() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bandwidth, "find", lambda name: LittleMemory("cpu", "cpu", "gloo"))
        # Two blocks of 4 MiB in float32 are already more than 90 % of 8 MB.
        row = measured("all-gather", "float32")
        assert row["skipped"] == "needs 8 MiB on each rank, and only 7 MiB are free"
        assert "us" not in row
        assert "us" in measured("all-gather", "bfloat16")
        # Two ranks on one device share the free memory.
        assert "skipped" in measured("all-gather", "bfloat16", most=2)
        assert "skipped" in measured("all-gather", "bfloat16", elements=1 << 20)


@pytest.mark.spec("KIT-16")
@pytest.mark.filterwarnings(NO_NEW_NAMES)
@ranks(2)
def test_rank_that_runs_out_of_memory_makes_all_ranks_skip_the_size() -> None:
    def no_memory(*shape: Any, **options: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(torch, "empty", no_memory)
        assert "skipped" in measured("all-gather")
    assert "us" in measured("all-gather")


@pytest.mark.spec("KIT-16")
@pytest.mark.filterwarnings(NO_NEW_NAMES)
@ranks(2)
def test_size_above_the_limit_is_skipped() -> None:
    row = measured("reduce-scatter", elements=(8 << 20) + 1)
    assert row["skipped"] == "larger than 16 MiB, the limit here"
    assert "us" in measured("reduce-scatter", elements=8 << 20)


# ---- times ----------------------------------------------------------------------------------------------------------


class Diary(Platform):
    """Records the operations on the stream and on the host."""

    did: list[str] = []

    def sleep(self, milliseconds: float) -> None:
        self.did.append("sleep")

    def mark(self) -> int:
        self.did.append("mark")
        return self.did.count("mark")

    def seconds_between(self, begin: int, end: int) -> float:
        return float(begin)

    def synchronize(self) -> None:
        self.did.append("wait")


@pytest.mark.spec("KIT-16")
def test_calls_without_the_host_are_queued_behind_a_busy_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Diary, "did", [])
    monkeypatch.setattr(bandwidth, "_smallest", lambda rate: rate)
    times = bandwidth._times(Diary("diary", "cpu", "gloo"), lambda: Diary.did.append("call"))
    queued = Diary.did[Diary.did.index("sleep") :]
    calls = bandwidth.NUM_CALLS + 1
    assert queued == ["sleep", "mark", *["call", "mark"] * calls, "wait"]
    assert Diary.did[3 : Diary.did.index("sleep")] == ["call", "wait"] * calls
    # The first of 21 calls is not counted.
    assert times["us"] == [1e6 * number for number in range(2, calls + 1)]
    assert len(times["host us"]) == bandwidth.NUM_CALLS


@pytest.mark.spec("KIT-16")
def test_slow_calls_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Diary, "did", [])
    monkeypatch.setattr(bandwidth, "_smallest", lambda rate: 1.0)  # another rank needs a second for a call
    bandwidth._times(Diary("diary", "cpu", "gloo"), lambda: Diary.did.append("call"))
    assert Diary.did.count("call") == 1 + 2 * (bandwidth.FEWEST_CALLS + 1)


class Event:
    """A CUDA event that counts the events before it."""

    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.number = -1

    def record(self) -> None:
        Event.made += 1
        self.number = Event.made

    def synchronize(self) -> None:
        assert self.number > 0

    def elapsed_time(self, end: Event) -> float:
        return 5.0 * (end.number - self.number)


@pytest.mark.spec("KIT-16")
def test_marks_on_a_gpu_are_events_and_memory_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = type("Properties", (), {"name": H100, "uuid": "GPU-1"})
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (7, 9))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert CUDA.seconds_between(CUDA.mark(), CUDA.mark()) == 0.005
    assert CUDA.free_memory() == 7
    assert CUDA.card() == (H100, "GPU-1")
    for platform in (CPU, SIMULATED):
        assert 0 <= platform.seconds_between(platform.mark(), platform.mark()) < 60
        assert platform.free_memory() > 1 << 20
        assert platform.card()[0].startswith("device type ")


# ---- the stage ------------------------------------------------------------------------------------------------------


@pytest.mark.spec("KIT-16", "KIT-17")
def test_stage_measures_both_collectives_and_says_that_ranks_share_a_device() -> None:
    findings = list(bandwidth.work(CPU, num_ranks=2, quick=True, hang_limit=60.0))
    pairs = list(itertools.product(bandwidth.COLLECTIVES, bandwidth.DTYPES))
    assert [(one["collective"], one["dtype"]) for one in findings] == pairs
    assert [one["outcome"] for one in findings] == ["passed"] * 4
    assert all(one["shared"] for one in findings)
    text = "\n".join(bandwidth_table.table(findings))
    assert "* 2 ranks: ranks share a device, so no speed has a meaning" in text
    assert "| all-gather | 2 | float32 | 1048576 | 131072 | " in text
    assert "7087872, GPT-2 block" not in text
    assert "| reduce-scatter | 2 | bfloat16 | 14175744, GPT-2 block | 3543936 | skipped: larger than 4 MiB" in text


@pytest.mark.spec("KIT-08", "KIT-16")
def test_chunk_runs_on_the_simulated_accelerator(tmp_path: Path) -> None:
    (chunk,) = stages._bandwidth(stages.Settings(CPU, tmp_path, quick=True))
    command = ["simulated" if word == "cpu" else word for word in chunk.command]
    outcome = run_chunk(replace(chunk, command=command), tmp_path)
    if not simulated.is_available():
        assert "The simulated accelerator cannot be used with torch" in outcome.reason
        return
    assert (outcome.word, outcome.reason) == ("passed", "")
    assert [one["card"] for one in outcome.findings] == ["device type sim"] * 4
    assert [row["wrong"] for one in outcome.findings for row in one["rows"] if "us" in row] == [0] * 4


@pytest.mark.spec("KIT-16")
def test_failure_of_the_ranks_ends_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> list[Any]:
        raise bandwidth.pool.Failure("hang: no answer from ranks [1] after 5 s")

    monkeypatch.setattr(bandwidth, "on_ranks", fail)
    (finding,) = bandwidth.work(CPU, num_ranks=2, quick=True, hang_limit=5.0)
    assert finding["outcome"] == "failed"
    assert finding["text"] == "2 ranks:\nhang: no answer from ranks [1] after 5 s"
    assert "* 2 ranks: not all measured, see the failures" in list(bandwidth_table.table([finding]))


# ---- the card -------------------------------------------------------------------------------------------------------


def a_finding(card: str = H100, busbw: float = 300.0, shared: bool = False, size: int = 1 << 28) -> dict[str, Any]:
    row = {"what": "", "bytes": size, "count": 9, "memory": 9, "us": [1.0, 2.0, 3.0], "host us": [4.0, 5.0, 6.0]}
    row |= {"algbw": 2 * busbw, "busbw": busbw, "wrong": 0}
    about = {"ranks": 2, "card": card, "shared": shared, "collective": "all-gather", "dtype": "float32"}
    return {**about, "outcome": "passed", "rows": [row]}


@pytest.mark.spec("KIT-17")
def test_bandwidth_is_compared_with_the_link_of_the_card() -> None:
    words = {202: "WARN", 203: "PASS", 450: "PASS", 451: "WARN"}  # 45 % of 450 is 202.5
    for busbw, word in words.items():
        finding = a_finding(busbw=busbw)
        (row,) = bandwidth_table.rows([finding])
        assert row["word"] == word
        assert row["of link"] == f"{busbw / 450:.0%}"
    text = "\n".join(bandwidth_table.table([a_finding()]))
    assert "* H100 SXM: NVLink, peak 450 in one direction; PASS from 45% of it, for 128 MiB or more" in text
    assert "| 2.0 (1.0 to 3.0) | 5.0 (4.0 to 6.0) | 600.0 | 300.0 | 67% | 0 | PASS |" in text


@pytest.mark.spec("KIT-17")
@pytest.mark.parametrize(
    ("finding", "stated"),
    [
        (a_finding(card="NVIDIA Unheard-Of 1"), "* NVIDIA Unheard-Of 1: no peak is known for this card"),
        (a_finding(card=f"{H100}, NVIDIA A10"), f"* {H100}, NVIDIA A10: no peak is known for this card"),
        (a_finding(shared=True), "* 2 ranks: ranks share a device, so no speed has a meaning"),
    ],
)
def test_without_a_meaningful_peak_there_is_no_word(finding: dict[str, Any], stated: str) -> None:
    (row,) = bandwidth_table.rows([finding])
    assert (row["word"], row["of link"]) == ("", "")
    assert stated in list(bandwidth_table.table([finding]))


@pytest.mark.spec("KIT-17")
def test_small_tensors_have_no_word() -> None:
    (row,) = bandwidth_table.rows([a_finding(size=1 << 20, busbw=1.0)])
    assert (row["word"], row["of link"]) == ("", "0%")


@pytest.mark.spec("KIT-17")
def test_cards_are_found_by_the_names_that_torch_reports() -> None:
    names = {
        "NVIDIA A100-SXM4-80GB": "A100 SXM",
        "NVIDIA A100 80GB PCIe": "A100 PCIe",
        "NVIDIA A100-PCIE-40GB": "A100 PCIe",
        H100: "H100 SXM",
        "NVIDIA H100 PCIe": "H100 PCIe",
        "NVIDIA H200": "H200 SXM",
        "NVIDIA B200": "B200",
        "NVIDIA L40S": "L40S",
        "NVIDIA A10": "A10",
        "NVIDIA GeForce RTX 4090": "RTX 4090",
    }
    for name, short in names.items():
        card = find_card(name)
        assert card is not None
        assert card.name == short
    for name in ("NVIDIA A10G", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA L40", "device type cpu", ""):
        assert find_card(name) is None
    for card in CARDS:
        assert card.wire in ("NVLink", "PCIe")
        # PCIe of generation 4 or 5 with 16 lanes.
        assert card.link in (32, 64) or card.wire == "NVLink"
        assert 0 < card.rates["float32"] < card.rates["bfloat16"]
