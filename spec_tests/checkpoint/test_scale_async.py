"""Saves that run while training continues, and a training that moves between numbers of ranks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions

from spec_tests import subject
from spec_tests.checkpoint.checkpoints import make, quiet
from spec_tests.checkpoint.scale import APIS, shard
from spec_tests.harness import device, ranks
from spec_tests.models.running import batch, loss_of
from spec_tests.models.values import assert_same

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
each_api = pytest.mark.parametrize("api", APIS)
LIMIT = 30.0


class HeldWriter(dcp.FileSystemWriter):
    """Writes files only after ``may_write`` has been set.

    Attributes:
        has_begun: set when the save reaches its files.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.has_begun, self.may_write = threading.Event(), threading.Event()

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.has_begun.set()
        if not self.may_write.wait(LIMIT):
            raise TimeoutError("the test did not allow the save to write")
        return super().write_data(plan, planner)


def built(api: str, group: dist.ProcessGroup | None = None, seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    """A sharded model and its optimizer. With 8 ranks, each parameter has fewer rows than there are ranks."""
    model = make(seed)
    model = shard(api, model, [model.first, model.second], group)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(model: Any, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    """One step with the same batch on all ranks. Returns the loss."""
    optimizer.zero_grad()
    loss = loss_of(model(batch(number, 0, width=3)))
    loss.backward()
    optimizer.step()
    return loss.detach()


def full_state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All values by name, unsharded and copied, on every rank. All ranks of the model must call it."""
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    with quiet():
        weights, states = subject.get_state_dict(model, optimizer, options=options)
    values = {**weights, **states}
    return {name: value.detach().clone() for name, value in values.items() if isinstance(value, torch.Tensor)}


def read(path: Path, model: Any, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None = None) -> None:
    """Loads a checkpoint. All ranks of the model must call it."""
    with quiet():
        weights, states = subject.get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=path, process_group=group)
        subject.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@pytest.mark.spec("SCALE-05")
@each_api
@ranks(2)
def test_training_continues_during_a_save_of_earlier_values(api: str, tmp_path: Path) -> None:
    undisturbed, optimizer = built(api)
    expected_losses = [train(undisturbed, optimizer, number) for number in range(6)]
    model, optimizer = built(api)
    losses = [train(model, optimizer, number) for number in range(2)]
    at_the_call = full_state(model, optimizer)
    # The save communicates in a thread, so it needs a group of its own.
    group, writer = dist.new_group(backend="gloo"), HeldWriter(tmp_path / "saved")
    with quiet():
        weights, states = subject.get_state_dict(model, optimizer)
        checkpoint = {"model": weights, "optimizer": states}
        saving = dcp.async_save(checkpoint, storage_writer=writer, process_group=group)
    assert writer.has_begun.wait(LIMIT)
    losses += [train(model, optimizer, number) for number in range(2, 5)]
    assert not saving.done()
    writer.may_write.set()
    saving.result(LIMIT)
    losses.append(train(model, optimizer, 5))
    assert losses == expected_losses
    now = full_state(model, optimizer)
    assert all(not torch.equal(now[name], value) for name, value in at_the_call.items() if value.ndim)
    again, restored = built(api, seed=1)
    read(tmp_path / "saved", again, restored)
    assert_equal(full_state(again, restored), at_the_call)


@pytest.mark.spec("SCALE-06")
@each_api
@ranks(8, timeout=150.0)
def test_training_goes_from_eight_ranks_to_two_to_four(api: str, tmp_path: Path) -> None:
    plain = make().to(device())
    oracle = torch.optim.Adam(plain.parameters(), lr=0.01)
    number = 0
    for turn, size in enumerate((8, 2, 4)):
        group = dist.new_group(list(range(size)))
        takes_part = dist.get_rank() < size
        if takes_part:
            model, optimizer = built(api, group, seed=turn)
        if takes_part and turn:
            read(tmp_path / str(turn - 1), model, optimizer, group)
            before = torch.load(tmp_path / f"full{turn - 1}", weights_only=True, map_location=device())
            assert_equal(full_state(model, optimizer), before)
        for number in range(2 * turn, 2 * turn + 2):
            expected = train(plain, oracle, number)
            if takes_part:
                torch.testing.assert_close(train(model, optimizer, number), expected)
        if takes_part:
            with quiet():
                weights, states = subject.get_state_dict(model, optimizer)
                both = {"model": weights, "optimizer": states}
                dcp.save(both, checkpoint_id=tmp_path / str(turn), process_group=group)
            full = full_state(model, optimizer)
            assert_same({name: full[name] for name, _ in plain.named_parameters()}, dict(plain.named_parameters()))
            if dist.get_rank() == 0:
                torch.save(full, tmp_path / f"full{turn}")
        dist.barrier()
