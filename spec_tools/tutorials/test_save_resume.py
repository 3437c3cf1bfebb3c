"""Saving and resuming a training: bitwise the same losses, the same state on other numbers of ranks, and attacks."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from minifsdp import ShardedGradScaler
from spec_tests.harness import ranks
from spec_tests.harness.programs import output_of_ranks

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "tutorials" / "train_gpt.py"
# Python adds this folder to the path when it starts the script.
sys.path.insert(0, str(SCRIPT.parent))

import train_gpt  # noqa: E402
from gpt import manifest  # noqa: E402
from gpt.checkpoint import CheckpointFolder  # noqa: E402
from gpt.manifest import CheckpointError  # noqa: E402
from gpt.ranks import Place, on_first_rank  # noqa: E402
from gpt.resume import Training, resume, save  # noqa: E402

TINY = ["--device=cpu", "--blocks=1", "--width=16", "--heads=2", "--context=16", "--batch=2", "--sample=1", "--lr=0.1"]
FIXED, NOTED = {"model": {"width": 16}}, {"seed": 0}


def place_here() -> Place:
    return Place(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo")


def parsed(*more: str) -> Namespace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(dist.get_world_size()))
        options: Namespace = train_gpt.parse([*TINY, *more])
    return options


def corpus() -> Any:
    text = torch.randint(32, 127, (4096,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return train_gpt.Corpus(text, text, 2, "a text for tests")


def losses_of(*more: str) -> list[float]:
    """Losses of the tutorial's ``train`` on the current ranks."""
    losses: list[float] = train_gpt.train(parsed(*more), corpus(), place_here())
    return losses


def fresh(*more: str) -> Training:
    options, place = parsed(*more), place_here()
    training: Training = train_gpt.start(train_gpt.build(options, place), options, place)
    return training


def same_step_everywhere(training: Training, step: int) -> float:
    """Trains on a batch that all ranks share, so that the mean over them is the same for any number of ranks."""
    inputs, targets = train_gpt.batch_of(corpus().train, seed=0, rank=0, step=step, num_windows=2, context=16)
    loss = train_gpt.train_step(training.model, training.optimizer, inputs, targets).item()
    training.finish_step(loss)
    return loss


def whole(training: Training) -> dict[str, Tensor]:
    """Every tensor of model and optimizer, unsharded, on rank 0."""
    state = training.api.get_state(training.model, training.optimizer, full=True)
    flat = {f"model.{name}": value for name, value in state["model"].items()}
    for name, values in state["optim"].get("state", {}).items():
        flat |= {f"optim.{name}.{kind}": torch.as_tensor(value) for kind, value in values.items()}
    return flat


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


# --- the same number of ranks ---


@pytest.mark.spec("TRAIN-10", "TRAIN-11", "TRAIN-12")
@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@ranks(2)
def test_resumed_run_has_bitwise_the_losses_of_an_uninterrupted_run(tmp_path: Path, full: bool, strategy: str) -> None:
    form = ["--full"] if full else []
    run = ["--steps=6", f"--strategy={strategy}"]
    uninterrupted = losses_of(*run)
    saving = [*run, f"--save={tmp_path}", f"--resume={tmp_path}", "--save-every=3", *form]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "save", save_and_stop)
        with pytest.raises(InterruptedError):
            losses_of(*saving)
    assert len(set(uninterrupted)) == 6
    assert losses_of(*saving) == uninterrupted


def save_and_stop(*args: Any, **kwargs: Any) -> None:
    save(*args, **kwargs)
    raise InterruptedError


@pytest.mark.spec("TRAIN-10")
@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
@ranks(2)
def test_resume_restores_scheduler_scaler_counters_and_losses(tmp_path: Path, full: bool) -> None:
    before = fresh()
    before.scaler = ShardedGradScaler(device="cpu", init_scale=128.0, growth_interval=2)
    before.scaler.scale(torch.ones(1))
    before.scaler.update(64.0)
    for step in range(3):
        same_step_everywhere(before, step)
    save(CheckpointFolder(tmp_path), before, fixed=FIXED, noted=NOTED, full=full)

    after = fresh()
    after.scaler = ShardedGradScaler(device="cpu", init_scale=2.0)
    assert resume(CheckpointFolder(tmp_path).newest(pytest.fail), after, fixed=FIXED, noted=NOTED) == []
    assert (after.step, after.losses) == (3, before.losses)
    assert after.scheduler.get_last_lr() == before.scheduler.get_last_lr() != fresh().scheduler.get_last_lr()
    assert after.scaler.get_scale() == 64.0
    assert after.scaler.get_growth_interval() == 2
    assert same_step_everywhere(after, 3) == same_step_everywhere(before, 3)


@ranks(2)
def test_each_rank_gets_back_its_own_random_numbers(tmp_path: Path) -> None:
    torch.manual_seed(100 + dist.get_rank())
    save(CheckpointFolder(tmp_path), fresh(), fixed=FIXED, noted=NOTED, full=False)
    expected = [random.random(), float(numpy.random.rand()), torch.rand(1).item()]
    resume(CheckpointFolder(tmp_path).newest(pytest.fail), fresh("--seed=9"), fixed=FIXED, noted=NOTED)
    assert [random.random(), float(numpy.random.rand()), torch.rand(1).item()] == expected


# --- other numbers of ranks ---


@ranks(4)
def train_on_four_ranks(folder: Path, reference: Path, full: bool) -> None:
    """On four ranks: trains for two steps and saves a checkpoint and its state; then the losses of three more steps."""
    training = fresh()
    for step in range(2):
        same_step_everywhere(training, step)
    save(CheckpointFolder(folder), training, fixed=FIXED, noted=NOTED, full=full)
    state = whole(training)
    losses = [same_step_everywhere(training, step) for step in range(2, 5)]
    if dist.get_rank() == 0:
        torch.save((state, losses), reference)


def resume_and_compare(folder: Path, reference: Path, full: bool, step: int) -> None:
    """On fewer ranks: checks bitwise equal tensors and the same loss. Then saves a checkpoint of the next step."""
    training = fresh()
    remarks = resume(CheckpointFolder(folder).newest(pytest.fail), training, fixed=FIXED, noted=NOTED)
    assert remarks == [f"ranks was {2 * dist.get_world_size()}, and is {dist.get_world_size()} now"]
    assert training.step == step
    ours = whole(training)
    expected, losses = torch.load(reference)
    if dist.get_rank() == 0:
        assert_equal(ours, expected)
        assert len([name for name in ours if name.endswith("exp_avg")]) == len(ours) // 4
    ahead = same_step_everywhere(training, step)
    assert ahead == pytest.approx(losses[0], abs=1e-5)
    save(CheckpointFolder(folder), training, fixed=FIXED, noted=NOTED, full=full)
    state = whole(training)
    on_first_rank(lambda: torch.save((state, losses[1:]), reference))


@ranks(2)
def resume_on_two_ranks(folder: Path, reference: Path, full: bool) -> None:
    resume_and_compare(folder, reference, full, step=2)


@ranks(1)
def resume_on_one_rank(folder: Path, reference: Path, full: bool) -> None:
    resume_and_compare(folder, reference, full, step=3)


@pytest.mark.ranks
@pytest.mark.spec("TRAIN-12")
@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
def test_checkpoint_of_four_ranks_resumes_on_two_and_one(tmp_path: Path, full: bool) -> None:
    files: dict[str, Any] = {"folder": tmp_path / "checkpoints", "reference": tmp_path / "reference", "full": full}
    train_on_four_ranks(**files)
    resume_on_two_ranks(**files)
    resume_on_one_rank(**files)


# --- refused checkpoints ---


def refused(training: Training, folder: Path) -> str:
    """Checks that ``resume`` fails and changes nothing. Returns the message."""
    before, optimizer = whole(training), training.optimizer.state_dict()
    with pytest.raises(CheckpointError, match=rf"^rank {dist.get_rank()}: {folder}/step-") as error:
        resume(CheckpointFolder(folder).newest(pytest.fail), training, fixed=FIXED, noted=NOTED)
    assert_equal(whole(training), before)
    assert training.optimizer.state_dict()["param_groups"] == optimizer["param_groups"]
    assert training.step == len(training.losses)
    return str(error.value)


@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
@ranks(2)
def test_checkpoint_with_different_keys_or_shapes_is_refused(tmp_path: Path, full: bool) -> None:
    saved, warm = fresh(), fresh("--width=32")
    same_step_everywhere(saved, 0)
    same_step_everywhere(warm, 0)
    save(CheckpointFolder(tmp_path), saved, fixed=FIXED, noted=NOTED, full=full)
    file = "full.pt" if full else ".metadata"
    wider = f"file {file}, key model.embedding.weight: expected (256, 32), found (256, 16) (rank 0, 1)"
    assert wider in refused(fresh("--width=32"), tmp_path)
    assert wider in refused(warm, tmp_path)
    deeper = f"file {file}, key model.blocks.1.norm1.weight: expected (16,), found nothing"
    assert deeper in refused(fresh("--blocks=2"), tmp_path)


@ranks(2)
def test_checkpoint_of_another_model_or_optimizer_is_refused_by_its_notes(tmp_path: Path) -> None:
    save(CheckpointFolder(tmp_path), fresh(), fixed={"model": {"width": 32}}, noted=NOTED, full=False)
    assert "file manifest.json, key model.width: expected 16, found 32 (rank 0, 1)" in refused(fresh(), tmp_path)
    save(CheckpointFolder(tmp_path), fresh(), fixed=FIXED, noted=NOTED, full=False)
    other = fresh()
    other.optimizer = torch.optim.SGD(other.model.parameters(), lr=0.1, momentum=0.9)
    assert "key optimizer: expected SGD, found AdamW" in refused(other, tmp_path)
    scaled = fresh()
    scaled.scaler = ShardedGradScaler(device="cpu")
    assert "file progress.pt, key progress.scaler: expected True, found False" in refused(scaled, tmp_path)


class Attack:
    """Runs a command when it is unpickled, here to create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def put_attack(folder: Path, file: str, mark: Path) -> None:
    """Changes a file of a checkpoint, and the checksums. Any program that can write a checkpoint can do this."""
    if file == ".metadata":
        metadata = pickle.loads((folder / file).read_bytes())
        metadata.planner_data["attack"] = Attack(mark)
        (folder / file).write_bytes(pickle.dumps(metadata))
    else:
        torch.save(Attack(mark), folder / file)
    path = folder / manifest.MANIFEST
    facts = json.loads(path.read_bytes())
    facts.pop("seal")
    facts["files"][file] = manifest.seal_of(folder / file)
    path.write_bytes(manifest.sealed(facts))


@pytest.mark.spec("SAVE-04")
@pytest.mark.parametrize("file", [".metadata", "progress.pt", "full.pt"])
@ranks(2)
def test_code_in_a_checkpoint_with_valid_checksums_does_not_run(tmp_path: Path, file: str) -> None:
    folder = save(CheckpointFolder(tmp_path / "runs"), fresh(), fixed=FIXED, noted=NOTED, full=file == "full.pt")
    mark = tmp_path / "mark"
    on_first_rank(lambda: put_attack(folder, file, mark))
    training = fresh()
    before = whole(training)
    checkpoint = CheckpointFolder(tmp_path / "runs").newest(pytest.fail)
    with pytest.raises(RuntimeError, match=r"(?s)rank 0: UnpicklingError: .*system.*rank 1: UnpicklingError"):
        resume(checkpoint, training, fixed=FIXED, noted=NOTED)
    assert not mark.exists()
    assert_equal(whole(training), before)


# --- the command line ---


def output_of(*arguments: str, num_ranks: int = 2) -> str:
    """The output of the whole program."""
    return output_of_ranks(SCRIPT, *TINY, *arguments, num_ranks=num_ranks, environment={"OMP_NUM_THREADS": "1"})


@pytest.mark.spec("TRAIN-11")
def test_repeated_command_resumes(tmp_path: Path) -> None:
    line = [f"--save={tmp_path}", f"--resume={tmp_path}"]
    first = output_of(*line, "--steps=2", "--save-every=1", "--keep=1")
    assert re.findall(r"^saved +(.*)", first, re.MULTILINE) == [f"{tmp_path}/step-00000{step}" for step in (1, 2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newest", "step-000002"]

    second = output_of(*line, "--steps=3", num_ranks=1)
    assert re.findall(r"^resume +(.*)", second, re.MULTILINE) == [
        f"{tmp_path}/step-000002: 2 steps are done",
        "changed since the checkpoint: ranks was 2, and is 1 now",
        "changed since the checkpoint: steps was 2, and is 3 now",
    ]
    assert "step     3 of 3" in second
    assert "step     1 of 3" not in second
