"""The main tutorial: its parts one by one, and the whole program as a user starts it."""

from __future__ import annotations

import json
import re
import sys
import weakref
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from spec_tests.harness.programs import output_of_ranks
from spec_tests.ports import free_port
from spec_tools.tutorials import started_by_a_user
from tutorials.gpt import options
from tutorials.gpt import ranks as starting

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "tutorials" / "train_gpt.py"
TINY = ["--device=cpu", "--steps=4", "--blocks=2", "--width=32", "--heads=2", "--context=32", "--batch=2", "--sample=8"]
# Number of parameters: 12 * 32**2 + 4 * 32 in each of the 2 blocks, and 256 * 32 + 2 * 32 in the root.
BLOCK, ROOT = 12_416, 8_256
WHOLE = 4 * (2 * BLOCK + ROOT)


# --- devices and the process group ---


@pytest.mark.pure
@pytest.mark.spec("TRAIN-02")
def test_a_gpu_is_chosen_by_the_local_rank_and_only_if_there_is_one_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    assert starting.choose_device("auto", local_rank=1, local_ranks=2) == (torch.device("cuda", 1), "")
    assert starting.choose_device("cpu", local_rank=1, local_ranks=2) == (torch.device("cpu"), "")
    device, remark = starting.choose_device("auto", local_rank=2, local_ranks=3)
    assert device == torch.device("cpu")
    assert "3 ranks need 3 GPUs, and this machine has 2" in remark
    with pytest.raises(SystemExit, match="use --device cpu"):
        starting.choose_device("cuda", local_rank=2, local_ranks=3)


@pytest.mark.pure
@pytest.mark.spec("TRAIN-02")
def test_process_group_exists_inside_and_ends_after_it_but_not_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **address}.items():
        monkeypatch.setenv(name, value)

    groups = []

    def join(error: type[Exception] | None) -> None:
        with starting.joined_ranks("cpu") as place:
            assert (place.rank, place.num_ranks, place.backend, dist.get_backend()) == (0, 1, "gloo", "gloo")
            groups.append(weakref.ref(dist.group.WORLD))
            if error is not None:
                raise error

    join(None)
    assert not dist.is_initialized()
    # No reference to the group is left, so its threads have ended and cannot outlive the interpreter.
    assert groups[0]() is None
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(ZeroDivisionError):
        join(ZeroDivisionError)
    # The exit handler of minifsdp still needs the group to query the other ranks (MACHINES-08).
    assert dist.is_initialized()
    dist.destroy_process_group()
    assert groups[1]() is None


# --- the command line ---


@pytest.mark.pure
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--steps=0"], "0 is not at least 1"),
        (["--trace=/no/such/folder/out.json"], "the folder /no/such/folder does not exist"),
        (["--strategy=hybrid_shard", "--world-size=3"], "3 ranks are not pairs"),
        (["--api=fully_shard", "--strategy=NO_SHARD"], "DistributedDataParallel"),
        (["--api=fully_shard", "--prefetch=NONE"], "always uses BACKWARD_PRE"),
    ],
)
def test_a_wrong_option_is_explained_before_anything_starts(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as stop:
        options.parse(arguments)

    assert stop.value.code == 2
    assert problem in capsys.readouterr().err


# --- the whole program ---


def output_of(*command: str) -> str:
    """Runs a command as a user would. Returns what it printed."""
    done = started_by_a_user(sys.executable, *command, PYTHONPATH=str(REPOSITORY))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def table(output: str) -> dict[str, list[str]]:
    """The cells of every row of every table, by the name of the row."""
    rows = (re.split(r"\s{2,}", line.strip()) for line in output.splitlines())
    return {row[0]: row[1:] for row in rows if len(row) > 1}


def losses(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"of 4 +loss +(\d+\.\d+)", output)]


@pytest.mark.spec("TRAIN-01", "TRAIN-21")
def test_two_ranks_train_under_torchrun_and_one_of_them_reports() -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    output = output_of(*launch, str(SCRIPT), *TINY)

    assert "on 2 ranks (cpu, gloo)" in output
    assert output.count("step     4 of 4") == 1
    assert len(losses(output)) == 4
    assert "what the model writes after 'def '\n\ndef " in output
    half = f"{WHOLE // 2:,}"
    assert table(output)["rank 0"][:2] == table(output)["rank 1"][:2] == [half, half]
    assert table(output)["not sharded"] == [f"{WHOLE:,}", f"{WHOLE:,}", f"{2 * WHOLE:,}", f"{4 * WHOLE:,}"]


@pytest.mark.spec("TRAIN-01")
def test_script_without_launcher_starts_its_ranks_and_draws_their_steps(tmp_path: Path) -> None:
    trace, picture = tmp_path / "steps.json", tmp_path / "step.svg"
    # A learning rate that suits four steps, so that the loss clearly goes down.
    output = output_of(str(SCRIPT), *TINY, "--lr=0.2", f"--trace={trace}", f"--timeline={picture}")

    assert "on 2 ranks (cpu, gloo)" in output
    assert losses(output)[-1] < losses(output)[0] - 0.3
    groups = [group.get("class") for group in ET.parse(picture).iter("{http://www.w3.org/2000/svg}g")]
    # Two ranks; forward and backward of 3 units; 3 all-gathers in forward, and 2 in backward: the root stays unsharded.
    assert [groups.count(f"box {kind}") for kind in ("F", "B", "AG", "RS")] == [6, 6, 10, 6]
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event.get("cat") == "RS" for event in events) == 2 * 2 * 3  # Two ranks, two steps, three units.


@pytest.mark.spec("TRAIN-20")
def test_the_comparison_finds_equal_losses_half_the_memory_and_the_same_traffic_as_torch() -> None:
    rows = table(output_of_ranks(SCRIPT, "--compare", *TINY, num_ranks=2, environment={"OMP_NUM_THREADS": "1"}))
    whole, half, most = f"{WHOLE:,}", f"{WHOLE // 2:,}", f"{4 * (2 * BLOCK + ROOT):,}"

    assert rows["on each rank"] == ["single", "DDP", "torch FSDP", "minifsdp", "torch f_s", "mini f_s"]
    final = [float(cell) for cell in rows["final loss"]]
    assert max(final) - min(final) < 1e-5
    assert rows["parameters"] == rows["gradients"] == [whole, whole, half, half, half, half]
    # In backward the root, a block and the prefetched block are unsharded at once: with two blocks, the whole model.
    assert rows["peak unsharded, bytes"] == [whole, whole, most, most, "-", "-"]
    assert rows["all-gathers"] == ["0", "0", "5", "5", "5", "5"]
    assert rows["reduce-scatters"] == ["0", "0", "3", "3", "3", "3"]
    assert rows["all-reduces"] == ["0", "1", "0", "0", "0", "0"]
    # An all-reduce sends two halves. FSDP sends half of everything in forward, half of each block in backward (the root
    # needs no second all-gather), and half of everything in the reduce-scatters.
    sharded = f"{WHOLE // 2 + 4 * BLOCK + WHOLE // 2:,}"
    assert rows["bytes sent"] == ["0", whole, sharded, sharded, sharded, sharded]
