"""The order, the limits and the configurations of the GPU kit, and its text about a GPU that torch cannot use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spec_tests.harness import pool, ranks
from spec_tools.gpu import races, smoke, stages
from spec_tools.gpu.platforms import CUDA, NotHere, find
from tutorials.gpt import ranks as starting

TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040).\nPlease update"


def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError(TOO_OLD)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)


@pytest.mark.spec("KIT-01")
@pytest.mark.pure
def test_kit_says_why_torch_cannot_use_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    no_driver(monkeypatch)
    with pytest.raises(NotHere, match=r"CUDA 13\.0: The NVIDIA driver on your system is too old .*\), so there is"):
        find("cuda")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(NotHere, match="this build has no CUDA"):
        find("cuda")


@pytest.mark.spec("TRAIN-02")
@pytest.mark.pure
def test_tutorial_says_why_it_uses_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    no_driver(monkeypatch)
    chosen, remark = starting.choose_device("auto", local_rank=0, local_ranks=1)
    assert chosen == torch.device("cpu")
    assert remark.startswith("torch finds no GPU: The NVIDIA driver on your system is too old")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert starting.choose_device("auto", local_rank=0, local_ranks=1) == (torch.device("cpu"), "")


@pytest.mark.spec("KIT-02")
@pytest.mark.pure
def test_first_stages_have_time_for_a_slow_start() -> None:
    assert 2 * pool.START_LIMIT + len(smoke.APIS) * smoke.LIMIT < stages.FIRST_LIMIT


@pytest.mark.spec("KIT-02")
@pytest.mark.pure
def test_tests_of_streams_are_first_and_benchmarks_last() -> None:
    chunks = stages._suite(stages.Settings(CUDA, Path()))
    about_streams = ['"STREAM-' in (stages.ROOT / "spec_tests" / chunk.name[6:]).read_text() for chunk in chunks]
    assert about_streams == sorted(about_streams, reverse=True)
    assert any(about_streams)
    assert stages.STAGES[-1].name == "benchmarks"


@pytest.mark.spec("KIT-06")
@pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")  # torch 2.13 has newer names for them
@pytest.mark.parametrize(
    "configuration",
    [
        "wrapper, single parameters",
        "wrapper, communication hook",
        "wrapper, float16",
        "function, optimizer in backward",
        "function, side stream",
        "function, hybrid, accumulation",
    ],
)
@ranks(4)
def test_race_hunt_has_hooks_streams_of_the_user_and_partial_sums(configuration: str) -> None:
    findings = races.hunt("cpu", configuration, 1)
    assert [finding["outcome"] for finding in findings] == 2 * ["passed"]
