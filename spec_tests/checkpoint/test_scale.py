"""Checkpoints as the number of ranks grows: files, bytes and memory are those of the formulas. Asynchronous saves."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions

from spec_tests import subject
from spec_tests.checkpoint import checkpoints, scale
from spec_tests.harness import ranks
from spec_tests.live_bytes import LiveBytes
from spec_tests.models.running import Wire
from spec_tools.processes.checkpoint_sizes import Checkpoint, llama_70b

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
# Step counters, and messages with which ranks compare their states. A second unit of unsharded values would exceed it.
SLACK = 200_000
LIMIT = 30.0


def stored_by_file(path: Path) -> tuple[Counter[str], int]:
    """Bytes of the tensors with rows in each file of a checkpoint, and the number of shards in its metadata."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    entries = {
        name: entry for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
    }
    stored: Counter[str] = Counter()
    for index, where in metadata.storage_data.items():
        entry = entries.get(index.fqn)
        if entry is not None and len(entry.size):
            sizes = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset)
            stored[where.relative_path] += sizes.numel() * entry.properties.dtype.itemsize
    return stored, sum(len(entry.chunks) for entry in entries.values())


@pytest.mark.cpu
@pytest.mark.spec("SCALE-01", "SCALE-02", "SCALE-03", "FS2-SD-12")
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("api", ["flat", "fully_shard"])
@ranks(8, timeout=150.0)
def test_files_bytes_and_memory_of_a_sharded_checkpoint(api: str, num_ranks: int, tmp_path: Path) -> None:
    group, rank, is_flat = dist.new_group(list(range(num_ranks))), dist.get_rank(), api != "fully_shard"
    expected = scale.checkpoint(num_ranks)
    if rank >= num_ranks:
        return
    with checkpoints.quiet(), LiveBytes() as live:
        model, optimizer = scale.trained(api, group)
        before = live.now()
        live.forget_peak()
        with Wire() as wire:
            weights, states = subject.get_state_dict(model, optimizer)
        assert live.peak - before == pytest.approx(expected.save_memory(rank, is_flat=is_flat), abs=SLACK)
        assert live.now() - before == pytest.approx(expected.file_bytes(rank) if is_flat else 0, abs=SLACK)
        sent = sum(numel for _, numel in wire.values) * 4 * (num_ranks - 1) / num_ranks
        assert sent == pytest.approx(expected.sent_bytes(is_flat=is_flat))
        before = live.now()
        live.forget_peak()
        both = {"model": weights, "optimizer": states}
        with Wire() as wire:
            dcp.save(both, checkpoint_id=tmp_path, process_group=group)
            dcp.load(both, checkpoint_id=tmp_path, process_group=group)
        assert wire.values == []
        # A rank reads one tensor of a file at a time.
        assert live.peak - before <= expected.largest_unit() + SLACK
        before = live.now()
        live.forget_peak()
        subject.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        assert live.peak - before == pytest.approx(expected.load_memory(rank, is_flat=is_flat), abs=SLACK)
    stored, num_listed = stored_by_file(tmp_path)
    assert len(list(tmp_path.iterdir())) == expected.num_files
    assert stored == {f"__{number}_0.distcp": expected.file_bytes(number) for number in range(num_ranks)}
    assert num_listed == expected.num_listed()


@pytest.mark.cpu
@pytest.mark.spec("SCALE-04", "SD-FULL-06", "OSD-05", "OSD-SCAT-02")
@pytest.mark.parametrize("api", scale.APIS)
@ranks(4)
def test_only_rank_0_holds_full_state_dicts(api: str) -> None:
    rank, is_wrapper = dist.get_rank(), api != "fully_shard"
    expected = scale.checkpoint(dist.get_world_size())
    dicts = expected.total_bytes() if rank == 0 else 0
    with checkpoints.quiet(), LiveBytes() as live:
        model, optimizer = scale.trained(api)
        before = live.now()
        live.forget_peak()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, states = subject.get_state_dict(model, optimizer, options=options)
        # With `fully_shard`, torch releases the results of its all-gathers later; three parameters have been observed.
        most = expected.largest_unit() * (1 if is_wrapper else 3)
        assert live.peak - before <= dicts + most + SLACK
        assert live.now() - before == pytest.approx(dicts, abs=SLACK)
        options, peaks = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True), []
        # With `fully_shard`, torch's function changes the dicts, so they can be loaded once.
        for _ in range(3 if is_wrapper else 1):
            before = live.now()
            live.forget_peak()
            subject.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states, options=options)
            peaks.append(live.peak - before)
        # The rank's own new averages, or its rows of the parameters; one unsharded unit, and rank 0's own part of it.
        own = expected.file_bytes(rank) * (expected.tensors - 1) // expected.tensors
        unit = expected.largest_unit() * (dist.get_world_size() + 1) // dist.get_world_size()
        # The thread of gloo may release a tensor some time after its collective has ended.
        assert min(peaks) <= own + unit + SLACK
    assert bool(weights) is (rank == 0)


@pytest.mark.cpu
@pytest.mark.spec("SCALE-04")
@ranks(4)
def test_a_full_state_dict_from_rank_0_is_kept_as_rows() -> None:
    """Broadcast values are not created by operators, so the living tensors are counted."""
    model, _ = scale.trained("flat")
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = subject.get_model_state_dict(model, options=full)
    own = {id(value) for value in weights.values()}
    sizes: list[int] = []
    receive = dist.broadcast_object_list

    def counted(*arguments: Any, **options: Any) -> None:
        receive(*arguments, **options)
        living = [one for one in gc.get_objects() if type(one) is torch.Tensor and id(one) not in own]
        # The model's own weights of this size are resharded, so their storages are empty.
        sizes.append(
            sum(one.shape == (scale.WIDTH, scale.WIDTH) and one.untyped_storage().nbytes() > 0 for one in living)
        )

    with checkpoints.quiet(), mock.patch.object(dist, "broadcast_object_list", counted):
        options = replace(full, cpu_offload=False, broadcast_from_rank0=True)
        subject.set_model_state_dict(model, weights, options=options)
    assert len(sizes) > len(list(model.parameters()))
    # Rank 0 sends its own tensors.
    assert max(sizes) == (0 if dist.get_rank() == 0 else 1)


class HeldWriter(dcp.FileSystemWriter):
    """Writes files only after ``may_write`` has been set. Sets ``has_begun`` when the save reaches its files."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.has_begun, self.may_write = threading.Event(), threading.Event()

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.has_begun.set()
        assert self.may_write.wait(LIMIT), "the test did not allow the save to write"
        return super().write_data(plan, planner)


@pytest.mark.spec("SCALE-05")
@pytest.mark.parametrize("api", scale.APIS)
@ranks(2)
def test_training_continues_during_a_save_of_earlier_values(api: str, tmp_path: Path) -> None:
    model, again = checkpoints.sharded(api), checkpoints.sharded(api, seed=1)
    optimizer, restored = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, again))
    checkpoints.train(model, optimizer, [0, 1])
    # The save communicates in a thread, so it needs a group of its own.
    group, writer = dist.new_group(backend="gloo"), HeldWriter(tmp_path / "saved")
    with checkpoints.quiet():
        weights, states = subject.get_state_dict(model, optimizer)
        both = {"model": weights, "optimizer": states}
        saving = dcp.async_save(both, storage_writer=writer, process_group=group)
    assert writer.has_begun.wait(LIMIT)
    losses = checkpoints.train(model, optimizer, range(2, 5))
    assert not saving.done()
    writer.may_write.set()
    saving.result(LIMIT)
    with checkpoints.quiet():
        weights, states = subject.get_state_dict(again, restored)
        both = {"model": weights, "optimizer": states}
        dcp.load(both, checkpoint_id=tmp_path / "saved")
        subject.set_state_dict(again, restored, model_state_dict=weights, optim_state_dict=states)
    # It continues from the step at which the save was called, with the losses of the training that continued.
    assert checkpoints.train(again, restored, range(2, 5)) == losses


@pytest.mark.spec("SCALE-07")
@pytest.mark.proof("arithmetic")
def test_a_large_checkpoint_on_a_thousand_ranks() -> None:
    large = Checkpoint(llama_70b(), num_ranks=1024)
    assert large.total_bytes() == 12 * 70_553_706_496
    assert sum(large.file_bytes(rank) for rank in range(1024)) == large.total_bytes()
    assert large.num_files == 1025
    # All dimensions are multiples of 1,024, except for 128,256: rows for 1,018 ranks.
    assert large.rows((128256, 8192), 1017) == 114
    assert [large.rows((128256, 8192), rank) for rank in (1018, 1023)] == [0, 0]
    assert large.num_listed() == 80 * 9 * (3 * 1024 + 1) + 2 * (3 * 1019 + 1) + 3 * 1024 + 1
    assert large.largest_unit() == pytest.approx(4 * (2 * 128256 + 1) * 8192, abs=4 * 1024)
