"""Claims about which ranks save and read, and where the full weights are assembled."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.utils._python_dispatch import TorchDispatchMode

from spec_tests.harness import device, ranks
from spec_tests.live_bytes import LiveBytes
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch, iterate
from spec_tests.models.sharding import sharded, wrapped
from spec_tests.oracles.counting import count_collectives
from spec_tests.subject import FullOptimStateDictConfig, FullStateDictConfig, FullyShardedDataParallel, StateDictType
from spec_tests.waiting import comes_true

FULL = StateDictType.FULL_STATE_DICT
FSDP: Any = FullyShardedDataParallel


@pytest.mark.spec("MYTH-40")
@ranks(2)
def test_rank_0_cannot_save_without_the_other_ranks() -> None:
    group = dist.new_group([0, 1])
    model = wrapped(process_group=group)
    group.set_timeout(timedelta(seconds=0.2))
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"rank\(s\) \[1\] did not call it within 0.2 seconds"):
            model.state_dict()
    dist.barrier()
    group.set_timeout(timedelta(minutes=1))
    # All ranks call it. Only rank 0 gets the entries, and would save them.
    with FSDP.state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True)):
        assert len(model.state_dict()) == (12 if dist.get_rank() == 0 else 0)


@pytest.mark.spec("MYTH-40")
@ranks(2)
def test_rank_0_alone_waits_for_the_backend_timeout_in_torch() -> None:
    # gloo on all devices, because NCCL would end the process.
    group = dist.new_group([0, 1], backend="gloo")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch_fsdp.FullyShardedDataParallel(nn.Linear(8, 8), process_group=group, device_id=torch.device("cpu"))
    group.set_timeout(timedelta(seconds=0.2))
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed out"):
            model.state_dict()
    dist.barrier()


class GathersAndCopies(TorchDispatchMode):
    """Records all-gathers and copies to the CPU, with their numbers of elements."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.order: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "allgather" in func.name():
            gathered = args[0] if isinstance(args[0], torch.Tensor) else args[0][0][0]
            # The simulated group only accepts tensors of its device. This mode intercepts the gloo calls underneath it.
            assert gathered.device == device() or device().type == "sim"
            self.order.append(f"AG {gathered.numel()}")
        elif func is torch.ops.aten._to_copy.default and (kwargs or {}).get("device") == torch.device("cpu"):
            self.order.append(f"D2H {result.numel()}")
        return result


@pytest.mark.spec("MYTH-42")
@ranks(2)
def test_full_weights_are_all_gathered_on_the_device_and_copied_afterwards() -> None:
    model = wrapped()
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, FULL, config), GathersAndCopies() as seen:
        model.state_dict()
    if dist.get_rank() == 0:
        # Only full-size tensors are copied: no shards are copied to the CPU and assembled there.
        block, root = ["AG 42", "D2H 36", "D2H 6"], ["AG 56", "D2H 36", "D2H 6", "D2H 12", "D2H 2"]
        assert seen.order == [*block * 4, *root]
    else:
        assert seen.order == [*["AG 42"] * 4, "AG 56"]


def resume(path: Path, *, first_alone: bool) -> tuple[Any, torch.optim.Optimizer, int | None]:
    """Resumes from a checkpoint. With ``first_alone``, rank 0 reads it and sends it; otherwise every rank reads it."""
    reads = not first_alone or dist.get_rank() == 0
    state = torch.load(path, map_location="cpu") if reads else {}
    plain = seeded()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    if reads:
        plain.load_state_dict(state["model"])
    model = wrapped(plain, sync_module_states=first_alone)
    optimizer = torch.optim.Adam(model.parameters())
    form = FullStateDictConfig(rank0_only=first_alone), FullOptimStateDictConfig(rank0_only=first_alone)
    with FSDP.state_dict_type(model, FULL, *form):
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state.get("optimizer", {})))
    counters: list[int | None] = [state.get("epoch")]
    dist.broadcast_object_list(counters, src=0)
    return model, optimizer, counters[0]


def outputs(model: Any, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """The outputs before and after a step."""
    with torch.no_grad():
        before = model(batch())
    iterate(model, optimizer=optimizer)
    return torch.stack([before, model(batch()).detach()])


@pytest.mark.spec("MYTH-44")
@ranks(2)
def test_checkpoint_is_read_by_one_rank_on_request(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    model = wrapped()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters())
    iterate(model, optimizer=optimizer)
    saved = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer), "epoch": 3}
    if dist.get_rank() == 0:
        torch.save(saved, path)
    dist.barrier()

    expected = outputs(model, optimizer)
    reads = {}
    for first_alone in (False, True):
        with mock.patch.object(torch, "load", wraps=torch.load) as load:
            model, optimizer, epoch = resume(path, first_alone=first_alone)
        assert epoch == 3
        assert torch.equal(outputs(model, optimizer), expected)
        # Received pickles are also read with this function, but not from the file.
        reads[first_alone] = sum(call.args == (path,) for call in load.call_args_list)
    assert reads == {False: 1, True: 1 if dist.get_rank() == 0 else 0}


def num_bytes(state: dict[str, torch.Tensor]) -> int:
    return sum(value.nbytes for value in state.values())


@pytest.mark.spec("MYTH-45")
@ranks(2)
def test_every_rank_unpickles_full_dict_sent_as_object() -> None:
    state = seeded().state_dict()
    box: list[Any] = [state if dist.get_rank() == 0 else None]
    with count_collectives() as as_object:
        dist.broadcast_object_list(box, src=0)
    assert num_bytes(box[0]) == num_bytes(state) == 896
    with count_collectives() as as_tensors:
        wrapped(sync_module_states=True)
    # Tensors are sent as their values only; an object is sent as a pickle, together with its size.
    assert as_tensors.num_bytes["broadcast"] == 896 < 2 * 896 < as_object.num_bytes["broadcast"]


class LiveValues(LiveBytes):
    """Live bytes of floating-point tensors only, because names and shapes are sent as byte tensors."""

    def _note(self, leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            super()._note(leaf)


@pytest.mark.spec("MYTH-45")
@ranks(2)
def test_rank_receiving_tensors_never_holds_full_dict() -> None:
    state = {name: value + 1 for name, value in seeded().state_dict().items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model = sharded()
    with LiveValues() as live:
        set_model_state_dict(model, dict(state) if dist.get_rank() == 0 else {}, options=options)
        if dist.get_rank() == 1:
            # The rank receives one value at a time, and frees the rows that it does not store.
            assert live.peak < num_bytes(state)
            assert comes_true(lambda: live.now() == 0)
    found = {name: value.full_tensor() for name, value in model.state_dict().items()}
    assert all(torch.equal(found[name], value) for name, value in state.items())
