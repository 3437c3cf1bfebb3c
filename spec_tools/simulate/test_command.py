"""``python -m minifsdp_tools.simulate``: its output, the search, and a large model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minifsdp_tools.simulate import search as search_module
from minifsdp_tools.simulate.__main__ import main
from minifsdp_tools.simulate.machine import CARDS, Card, Network
from minifsdp_tools.simulate.recording import record
from minifsdp_tools.simulate.replay import replay
from minifsdp_tools.simulate.report import GIB, USABLE, limit_of
from minifsdp_tools.simulate.search import extrapolated, search
from minifsdp_tools.simulate.setup import Setup
from minifsdp_tools.simulate.shapes import Shape
from spec_tools.simulate.small import SMALL, small

ROOT = Path(__file__).parents[2]
SIZES = "layers=2,width=64,heads=4,vocabulary=100,sequence=32"
NETWORK = Network(ranks_per_machine=4)


@pytest.mark.spec("SIMULATE-13")
def test_table_has_a_line_for_each_strategy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "step.svg"
    options = ["--ranks", "8", "--card", "A100-40", "--strategy", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    assert main([SIZES, *options, "--timeline", str(file)]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert "simulated, not measured" in lines[0]
    assert [line.split(",")[1].strip() for line in lines[3:]] == ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    assert all("CPU: the thread that issues kernels is always busy" in line for line in lines[3:])
    picture = file.read_text(encoding="utf-8")
    assert picture.startswith("<svg")
    assert "AG decoder.groups.1" in picture


@pytest.mark.spec("SIMULATE-13")
def test_json_has_a_line_for_each_run(capsys: pytest.CaptureFixture[str]) -> None:
    card = ["--teraflops", "100", "--memory", "16", "--bandwidth", "900", "--efficiency", "0.5", "--slowdown", "0.1"]
    options = ["--ranks", "8", "--api", "fsdp1", "--backward-prefetch", "none", "--no-limiter", "--forward-prefetch"]
    assert main([SIZES, *options, *card, "--json", "--within", "10"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["setup"]["backward_prefetch"] is None
    assert (found["setup"]["limit_all_gathers"], found["setup"]["forward_prefetch"]) == (False, True)
    assert (found["card"]["matmul"], found["card"]["memory"], found["card"]["slowdown"]) == (1e14, 16e9, 0.1)
    assert found["seconds"] > 0
    assert found["limit"].startswith("CPU")


@pytest.mark.spec("SIMULATE-13")
@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ([SIZES], "the card is not known. Choose --card, or give --teraflops"),
        (["gpt5", "--card", "H100"], "model is 'gpt5'. Choose one of gpt2"),
        ([SIZES, "--card", "H100", "--ranks", "0"], "num_ranks is 0; it must be at least 1"),
        ([SIZES, "--card", "H100", "--strategy", "HYBRID_SHARD", "--shards", "3"], "8 ranks cannot form copies of 3"),
        ([SIZES, "--card", "H100", "--costs", "no-file.json"], "No such file or directory"),
        (["spec_tools.simulate.small:tower", "--card", "H100", "--search"], "a search needs the sizes"),
    ],
)
def test_error_names_cause_and_remedy(options: list[str], cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([options[0], "--ranks", "8", *options[1:]])
    assert cause in capsys.readouterr().err


@pytest.mark.spec("SIMULATE-13")
def test_the_limiting_resource_is_named() -> None:
    recording = small(sequence=64, micro_batch=64)
    card = replace(CARDS["H100"], host_operator=0.0, host_collective=0.0, host_event=0.0)

    def limit(card: Card, network: Network) -> str:
        return limit_of(recording.setup, card, replay(recording, card, network))

    fast = Network(within=1e15, latency_within=0.0)
    assert limit(card, fast) == "compute"
    assert limit(card, Network(within=1e9)).startswith("network: computation waits ")
    assert limit(replace(card, host_operator=1.0), fast).startswith("CPU: ")
    held = replay(recording, card, fast).peak_held
    assert limit(replace(card, memory=held), fast).startswith("memory: does not fit, needs ")
    assert limit(replace(card, memory=held / USABLE + GIB), fast) == "compute"


@pytest.mark.spec("SIMULATE-14")
def test_prediction_from_few_layers_is_close_to_the_simulation_of_all() -> None:
    shape = Shape(12, 256, 4, 1000, sequence=512)
    base, card = Setup(shape, 8, micro_batch=4), CARDS["A100-40"]
    few = [replay(record(replace(base, model=replace(shape, layers=n))), card, NETWORK) for n in (2, 4)]
    predicted, simulated = extrapolated(few, (2, 4), 12), replay(record(base), card, NETWORK)
    assert predicted.seconds == pytest.approx(simulated.seconds, rel=0.03)
    assert predicted.peak_held == pytest.approx(simulated.peak_held, rel=0.03)
    assert predicted.mfu == pytest.approx(simulated.mfu, rel=0.05)
    assert predicted.tokens_per_second == pytest.approx(simulated.tokens_per_second, rel=0.03)


@pytest.mark.spec("SIMULATE-14")
def test_search_finds_the_fastest_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    setups = [
        Setup(SMALL, 8, strategy=strategy, micro_batch=size)
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP")
        for size in (1, 2, 16)
    ]
    monkeypatch.setattr(search_module, "candidates", lambda _: iter(setups))
    # Memory for two sequences and not for 16.
    memory = 1.2 * small(micro_batch=2).peak_bytes / USABLE
    card = replace(CARDS["H100"], memory=memory)
    runs, num_best = search(Setup(SMALL, 8), card, NETWORK)
    assert num_best == 3
    assert all(setup.micro_batch < 16 for setup, _ in runs[:4])
    rates = [result.tokens_per_second for _, result in runs[:num_best]]
    assert rates == sorted(rates, reverse=True)
    assert runs[0][0].micro_batch == 2
    assert all(limit_of(setup, card, result).startswith("memory: ") for setup, result in runs[4:])
    monkeypatch.setattr(search_module, "candidates", lambda _: iter(setups[:3]))
    assert main([SIZES, "--ranks", "8", "--card", "H100", "--search"]) == 0
    assert "settings. The first 3 are simulated with all layers" in capsys.readouterr().out


@pytest.mark.spec("SIMULATE-14")
def test_candidates_include_copies_on_one_and_several_machines() -> None:
    found = list(search_module.candidates(Setup(SMALL, 64, ranks_per_machine=8)))
    assert {setup.num_shards for setup in found if setup.strategy == "HYBRID_SHARD"} == {8, 16, 32}
    assert {setup.checkpointing for setup in found} == {"none", "selective", "full"}
    assert len(set(found)) == len(found)
    one = list(search_module.candidates(Setup(SMALL, 8, ranks_per_machine=8)))
    assert {setup.strategy for setup in one} == {"FULL_SHARD", "SHARD_GRAD_OP"}


@pytest.mark.spec("SIMULATE-16")
def test_llama_70b_on_1024_ranks_needs_little_memory() -> None:
    program = """
import resource, sys
from minifsdp_tools.simulate.__main__ import main
main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    options = ["llama3-70b", "--ranks", "1024", "--card", "H100", "--checkpointing", "full", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=True)
    line, kib = done.stdout.splitlines()[-2:]
    # 12 bytes for each parameter, divided by the ranks.
    assert json.loads(line)["stored_bytes"] == pytest.approx(12 * 70_553_706_496 / 1024, rel=0.01)
    assert int(kib) * 1024 < 4 * GIB
