"""The stage ``steps`` of the GPU kit: its figures, precisions, contenders that run out of memory, and estimates."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from spec_tests.harness import pool
from spec_tools.gpu import stages, steps, steps_table
from spec_tools.gpu.__main__ import Kit
from spec_tools.gpu.chunks import Chunk, Outcome
from spec_tools.gpu.intervals import Interval, exposed
from spec_tools.gpu.on_ranks import on_ranks
from spec_tools.gpu.platforms import CPU, CUDA, Platform
from spec_tools.gpu.progress import Progress
from spec_tools.gpu.stages import Settings, Stage

TORCH1, MINI1, TORCH2, MINI2 = steps.CONTENDERS


def work(precision: str = "bf16", num_turns: int = 1, num_ranks: int = 1, platform: Platform = CPU) -> list[Any]:
    arguments: dict[str, Any] = {"size": "tiny", "hang_limit": 60.0, "num_ranks": num_ranks}
    return list(steps.work(platform, precision=precision, num_turns=num_turns, **arguments))


@pytest.mark.spec("KIT-09")
@pytest.mark.parametrize(("precision", "num_turns"), [("fp32", 1), ("bf16", 2)])
def test_training_steps_of_all_contenders_are_measured_and_their_losses_agree(precision: str, num_turns: int) -> None:
    findings = work(precision, num_turns)
    assert [finding["contender"] for finding in findings] == list(steps.CONTENDERS)
    assert [finding["outcome"] for finding in findings] == ["passed"] * 4
    groups = num_turns * steps.PRECISIONS[precision].num_groups
    for finding in findings:
        assert len(finding["all ms"]) == groups
        assert finding["ms"] > 0
        assert finding["tokens/s"] > 0
        assert 0 < finding["host share"] <= 1
        # A CPU has no peak and no kernels of NCCL.
        assert "MFU %" not in finding
        assert "exposed ms" not in finding
    text = "\n".join(steps_table.table(findings))
    assert f"| tiny | 1 | {precision} | minifsdp fully_shard | {findings[3]['ms']} | " in text


@pytest.mark.spec("KIT-09")
def test_offload_trains_on_two_ranks_where_memory_cannot_be_pinned() -> None:
    findings = work("bf16, offload", num_ranks=2)
    # On a CPU, torch's FSDP1 with offload raises an exception, because it pins memory.
    assert [finding["contender"] for finding in findings] == [MINI1, TORCH2, MINI2]
    assert [finding["outcome"] for finding in findings] == ["passed"] * 3
    assert steps._can_run(CUDA, TORCH1, steps.PRECISIONS["bf16, offload"])


@pytest.mark.spec("KIT-09")
@pytest.mark.parametrize(
    ("precision", "off", "outcome"),
    [
        ("bf16", 0.03, "passed"),
        ("bf16", 0.05, "failed"),
        ("fp32", 0.0015, "passed"),
        ("fp32", 0.003, "failed"),
        # A comparison with NaN is false.
        ("bf16", float("nan"), "failed"),
    ],
)
def test_training_step_with_another_loss_fails(
    precision: str, off: float, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: Any, contender: str, **__: Any) -> list[Any]:
        return [a_turn(losses=[2.0, 2.0 + off if contender == MINI2 else 2.0])]

    monkeypatch.setattr(steps, "on_ranks", train)
    findings = work(precision)
    assert [finding["outcome"] for finding in findings] == ["passed", "passed", "passed", outcome]
    if outcome == "failed":
        assert findings[3]["text"] == f"tiny, {MINI2}: losses [2.0, {2.0 + off}], expected [2.0, 2.0]"


# ---- figures --------------------------------------------------------------------------------------------------------


def a_turn(ms: tuple[float, ...] = (100.0,), card: str = "device type cpu", **more: Any) -> dict[str, Any]:
    """The result of a rank."""
    turn = {"losses": [1.0], "ms": list(ms), "host ms": [one / 4 for one in ms], "card": card}
    return {**turn, "tokens": 8192, "flops": 40e12, "parameters": 5, **more}


@pytest.mark.spec("KIT-09")
def test_figures_are_medians_of_all_turns() -> None:
    figures = steps.joined([a_turn((100.0, 90.0)), a_turn((110.0,), **{"peak GiB": 3.5})], torch.bfloat16, True)
    assert (figures["ms"], figures["ms, range"], figures["all ms"]) == (100.0, [90.0, 110.0], [90.0, 100.0, 110.0])
    assert (figures["host ms"], figures["host share"]) == (25.0, 0.25)
    assert (figures["tokens/s"], figures["TFLOP/s"], figures["peak GiB"]) == (81920, 400.0, 3.5)


@pytest.mark.spec("KIT-09")
def test_mfu_is_relative_to_the_peak_of_the_card_for_the_dtype() -> None:
    turns = [a_turn(card="NVIDIA H100 80GB HBM3", flops=4e12)]  # 40e12 in a second
    assert steps.joined(turns, torch.bfloat16, True)["MFU %"] == 4.0  # of 989e12
    assert steps.joined(turns, torch.float32, True)["MFU %"] == 59.7  # of 67e12
    assert "MFU %" not in steps.joined(turns, torch.bfloat16, has_own_device=False)
    assert "MFU %" not in steps.joined([a_turn(card="Unheard-Of 1")], torch.bfloat16, True)


@pytest.mark.spec("KIT-09")
def test_operations_of_a_step_are_counted_by_hand() -> None:
    # 2 * 16 tokens; 10 parameters; attention: for each of 2 blocks, width 32 and 16 positions, half of 12 operations.
    assert steps.num_flops(steps.SIZES["tiny"], 10) == 32 * (60 + 6 * 2 * 32 * 16)


@pytest.mark.spec("KIT-09")
def test_exposed_communication_is_the_time_without_other_work() -> None:
    def sends(start: float, end: float) -> Interval:
        return Interval(start, end, True)

    def computes(start: float, end: float) -> Interval:
        return Interval(start, end, False)

    assert exposed([]) == 0
    assert exposed([sends(0, 4), computes(4, 10), sends(5, 12)]) == 6
    assert exposed([sends(0, 4), sends(2, 6)]) == 6  # two streams that communicate count once
    assert exposed([computes(0, 10), sends(2, 6)]) == 0
    assert exposed([computes(0, 3), computes(2, 5), sends(1, 9)]) == 4
    assert exposed([sends(7, 9), sends(0, 2), computes(3, 6)]) == 4  # in any order, with gaps
    assert exposed([sends(3, 3), computes(0, 1)]) == 0


class Profiler:
    """A profiler that has recorded the events of a step."""

    def __init__(self, activities: Any, acc_events: bool) -> None: ...

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None: ...

    def events(self) -> list[Any]:
        def event(name: str, start: float, end: float, where: Any, note: bool = False) -> Any:
            time_range = SimpleNamespace(start=start, end=end)
            return SimpleNamespace(name=name, time_range=time_range, device_type=where, is_user_annotation=note)

        return [
            event("cudaLaunchKernel", 0, 1, DeviceType.CPU),
            event("cudaLaunchKernelExC", 1, 2, DeviceType.CPU),
            event("cudaDeviceSynchronize", 30, 40, DeviceType.CPU),
            event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 5, 15, DeviceType.CUDA),
            event("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", 10, 20, DeviceType.CUDA),
            # A range on the GPU's timeline, which is not a kernel.
            event("FSDP::all_gather", 0, 30, DeviceType.CUDA, note=True),
        ]


@pytest.mark.spec("KIT-09")
def test_profile_has_runtime_calls_and_kernels_without_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    called: list[int] = []
    calls, kernels = CUDA.profiled(lambda: called.append(1))
    assert (called, calls) == ([1], {"syncs": 1, "mallocs": 0, "launches": 2})
    assert kernels == [Interval(5, 15, True), Interval(10, 20, False)]
    assert exposed(kernels) == 5
    assert CPU.profiled(lambda: called.append(2)) == ({}, [])
    assert called == [1, 2]


# ---- out of memory --------------------------------------------------------------------------------------------------


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def need_too_much_memory() -> None:
    torch.empty(1 << 55)


@pytest.mark.spec("KIT-19")
@pytest.mark.parametrize("body", [run_out_of_memory, need_too_much_memory])
def test_failure_of_a_rank_without_memory_is_recognized(body: Any) -> None:
    with pytest.raises(pool.Failure) as failure:
        on_ranks(CPU, 1, body, 60.0)
    assert steps._is_out_of_memory(str(failure.value))
    assert not steps._is_out_of_memory("hang: no answer from ranks [1] after 5 s")


OUT = "E   torch.OutOfMemoryError: CUDA out of memory."
BROKEN = "E   ValueError: broken on purpose"


@pytest.mark.spec("KIT-19")
@pytest.mark.parametrize(
    ("failing", "failed"),
    [
        ({TORCH1: OUT}, []),
        ({TORCH1: OUT, MINI1: OUT}, []),
        ({TORCH1: OUT, MINI1: OUT, TORCH2: OUT, MINI2: OUT}, []),
        ({MINI2: OUT}, [MINI2]),
        # The other API of torch also fits, which does not matter.
        ({TORCH1: OUT, MINI2: OUT}, [MINI2]),
        ({TORCH1: BROKEN, MINI1: OUT}, [TORCH1, MINI1]),
        ({MINI1: BROKEN}, [MINI1]),
    ],
)
def test_only_minifsdp_out_of_memory_fails(
    failing: dict[str, str], failed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def train(*_: Any, contender: str, **__: Any) -> list[Any]:
        started.append(contender)
        if contender in failing:
            raise pool.Failure(failing[contender])
        return [a_turn()]

    monkeypatch.setattr(steps, "on_ranks", train)
    findings = work(num_turns=2)
    assert [finding["contender"] for finding in findings if finding["outcome"] == "failed"] == failed
    # All contenders are started, and a second time only those that did not fail.
    alive = [contender for contender in steps.CONTENDERS if contender not in failing]
    assert started == list(steps.CONTENDERS) + alive
    rows = [line for line in steps_table.table(findings) if line.startswith("| tiny")]
    for row, contender in zip(rows, steps.CONTENDERS, strict=True):
        shown = "100.0" if contender in alive else "out of memory" if failing[contender] == OUT else "failed"
        assert f"| {contender} | {shown} |" in row


# ---- estimates ------------------------------------------------------------------------------------------------------


@pytest.mark.spec("KIT-19")
@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_quick_run_of_both_stages_is_estimated_below_three_minutes(
    num_devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Platform, "num_devices", lambda self: num_devices)
    quick, whole = Settings(CUDA, Path(), quick=True), Settings(CUDA, Path())
    chunks = [*stages._bandwidth(quick), *stages._steps(quick)]
    assert all(chunk.estimate > 0 for chunk in chunks)
    assert sum(chunk.estimate for chunk in chunks) < 180
    assert sum(chunk.estimate for chunk in chunks) < sum(chunk.estimate for chunk in stages._steps(whole))
    for chunk in [*chunks, *stages._bandwidth(whole), *stages._steps(whole)]:
        assert chunk.estimate < chunk.limit / 2
    names = [chunk.name for chunk in stages._steps(whole)]
    assert len(set(names)) == len(names)
    most = max(1, num_devices)
    assert {f"steps/{most}-ranks/1.3B, {precision}" for precision in steps.PRECISIONS} <= set(names)


@pytest.mark.spec("KIT-19")
def test_kit_prints_the_estimate_of_a_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("spec_tools.gpu.__main__.run_chunk", lambda *args, **options: Outcome("passed", 1.0))
    chunks = [Chunk("steps/a", [], 9.0, estimate=41.6), Chunk("suite/b", [], 9.0)]
    progress = Progress(tmp_path / "run", {})
    kit = Kit(Settings(CPU, tmp_path / "run"), progress, tmp_path / "report.md")
    kit.run([Stage("steps", "is it so", lambda settings: chunks)])
    progress.close()
    said = capsys.readouterr().out
    assert "  steps/a: about 42 s\n" in said
    assert "suite/b: about" not in said
