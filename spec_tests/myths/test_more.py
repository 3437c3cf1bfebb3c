"""Claims about scalers, loading, and the script of the T5 tutorial."""

from __future__ import annotations

import argparse
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from spec_tests.harness import device, ranks
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch
from spec_tests.models.sharding import sharded, wrapped
from spec_tests.subject import FullyShardedDataParallel, StateDictType

FSDP: Any = FullyShardedDataParallel


@pytest.mark.spec("MYTH-31")
@ranks(2)
def test_plain_grad_scaler_skips_the_step_only_on_the_rank_with_an_overflow() -> None:
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device().type)
    scaler.scale(model(batch()).square().mean()).backward()
    if dist.get_rank() == 0:
        next(model.parameters()).grad[0] = math.inf
    before = [p.detach().clone() for p in model.parameters()]
    scaler.step(optimizer)
    has_stepped = not all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    # Rank 0 has the old weights and rank 1 the new ones, so the model is now a mixture of both.
    assert has_stepped is (dist.get_rank() == 1)


@pytest.mark.spec("MYTH-37")
@pytest.mark.proof("arithmetic")
@ranks(2)
def test_a_variable_that_only_rank_0_has_set_cannot_be_broadcast_by_the_others() -> None:
    def what_is_sent() -> list[Any]:
        if dist.get_rank() == 0:
            checkpoint = {"epoch": 3}
        return [checkpoint]

    if dist.get_rank() == 0:
        assert what_is_sent() == [{"epoch": 3}]
    else:
        with pytest.raises(NameError, match="checkpoint"):
            what_is_sent()


@pytest.mark.spec("MYTH-61")
@ranks(2)
def test_the_context_of_the_wrapper_changes_nothing_for_fully_shard() -> None:
    model = sharded()
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = model.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())


@pytest.mark.spec("MYTH-71")
@pytest.mark.proof("arithmetic")
def test_the_length_of_a_batch_dict_is_the_number_of_its_keys() -> None:
    def average(batches: list[dict[str, torch.Tensor]], losses: list[float]) -> float:
        return sum(losses) / sum(len(one) for one in batches)

    small = {"source_ids": torch.zeros(1, 5), "source_mask": torch.zeros(1, 5), "target_ids": torch.zeros(1, 5)}
    large = {name: torch.zeros(100, 5) for name in small}
    assert average([small], [6.0]) == average([large], [6.0]) == 2.0


@pytest.mark.spec("MYTH-72")
@pytest.mark.proof("arithmetic")
def test_a_switch_that_stores_false_turns_its_feature_off() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-model", action="store_false", default=True)
    assert parser.parse_args([]).save_model is True
    assert parser.parse_args(["--save-model"]).save_model is False


@pytest.mark.spec("MYTH-74")
@pytest.mark.proof("arithmetic")
def test_best_model_is_never_saved_without_validation() -> None:
    best_val_loss, curr_val_loss = float("inf"), float("inf")
    saves = 0
    for _ in range(3):
        if curr_val_loss < best_val_loss:
            saves += 1
    assert saves == 0


@pytest.mark.spec("MYTH-80")
@pytest.mark.proof("arithmetic")
@ranks(2)
def test_ddp_reduces_buckets_and_not_single_gradients() -> None:
    model = DistributedDataParallel(seeded())
    num_buckets = 0

    # No annotations, because DDP reads them, and in this file they would be strings.
    def count(_, bucket):  # type: ignore[no-untyped-def]
        nonlocal num_buckets
        num_buckets += 1
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, count)
    model(batch()).sum().backward()
    assert num_buckets == 1 < len(list(model.parameters()))
