"""``DistributedDataParallel`` around sharded modules: state dicts work, and training is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from spec_tests.harness import device, ranks
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch
from spec_tests.models.sharding import grid, wrapped
from spec_tests.subject import FullyShardedDataParallel, StateDictType

FSDP: Any = FullyShardedDataParallel


@pytest.mark.spec("MYTH-28")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@ranks(2)
def test_state_dicts_are_dispatched_through_a_ddp_around_the_wrapper() -> None:
    expected = {f"module.{name}": value for name, value in seeded().state_dict().items()}
    outer = DistributedDataParallel(wrapped(), init_sync=False)
    with FSDP.state_dict_type(outer, StateDictType.FULL_STATE_DICT):
        full = outer.state_dict()
    with FSDP.state_dict_type(outer, StateDictType.SHARDED_STATE_DICT):
        in_parts = outer.state_dict()
    assert list(full) == list(in_parts) == list(expected)
    assert all(torch.equal(full[name], value) for name, value in expected.items())
    assert not any(type(value) is torch.Tensor for value in in_parts.values())


@pytest.mark.spec("MYTH-28")
@pytest.mark.parametrize("original", [False, True])
@ranks(4)
def test_training_through_a_ddp_around_the_wrapper_is_refused(original: bool) -> None:
    row, column = grid()
    model = wrapped(process_group=row, use_orig_params=original)
    outer = DistributedDataParallel(model, process_group=column, init_sync=False)
    with pytest.raises(RuntimeError, match=r"(?s)inside a DistributedDataParallel.*HYBRID_SHARD.*E-ddp-around"):
        outer(batch())
    with torch.no_grad():
        assert torch.isfinite(outer(batch())).all()


@pytest.mark.spec("MYTH-28")
@ranks(4)
def test_ddp_over_other_ranks_may_ignore_the_sharded_parameters() -> None:
    row, column = grid()
    by_rows, by_columns = (DistributedDataParallel(seeded(), process_group=group) for group in (row, column))
    model = seeded()
    model.blocks[0] = FSDP(model.blocks[0], process_group=row, use_orig_params=True, device_id=device())
    names = [name for name, _ in model.named_parameters() if name.startswith("blocks.0.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    for outer in (by_rows, by_columns, DistributedDataParallel(model, process_group=column)):
        outer(batch()).square().mean().backward()
    torch.testing.assert_close(model.leave.weight.grad, by_columns.module.leave.weight.grad)
    with FSDP.summon_full_params(model, with_grads=True):
        gradient = model.blocks[0].linear.weight.grad
    torch.testing.assert_close(gradient, by_rows.module.blocks[0].linear.weight.grad)
