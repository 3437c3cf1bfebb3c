"""The state dict of a module inside a unit, compared with that of the same module in a plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from spec_tests.checkpoint.checkpoints import flat_or_original, make, wrapped
from spec_tests.harness import ranks
from spec_tests.models.running import batch
from spec_tests.models.sharding import FLAT_STRATEGIES, NO_SHARD
from spec_tests.models.values import assert_same, full_values
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ShardingStrategy

PARTS = ("first.0", "second.0", "head", "")


@ranks(2)
def check_parts(keep: bool, strategy: ShardingStrategy) -> None:
    model = wrapped(make(), use_orig_params=keep, sharding_strategy=strategy)
    plain: Any = make()
    rank, paths = dist.get_rank(), {path.replace("_fsdp_wrapped_module.", ""): m for path, m in model.named_modules()}
    parts = [(paths[name] if name else model.module, plain.get_submodule(name)) for name in PARTS]
    for evaluates in (False, True):
        if evaluates:
            with torch.no_grad():
                model(batch(width=3))
        for part, same in parts:
            expected = same.state_dict()
            if keep and strategy is NO_SHARD:
                found = part.state_dict()
                assert all(torch.equal(found[name], value) for name, value in expected.items())
                part.load_state_dict(expected)
                continue
            for call in (part.state_dict, lambda part=part, expected=expected: part.load_state_dict(expected)):
                with pytest.raises(RuntimeError, match=rf"rank {rank}: .*inside of unit.*summon_full_params"):
                    call()
    assert_same(full_values(model), dict(plain.named_parameters()), bitwise=True)
    with FSDP.summon_full_params(model):
        for part, same in parts[:-1]:
            changed = {name: value + 1 for name, value in same.state_dict().items()}
            part.load_state_dict(changed)
            same.load_state_dict(changed)
            assert all(torch.equal(part.state_dict()[name], value) for name, value in changed.items())
    assert_same(full_values(model), dict(plain.named_parameters()), bitwise=True)


@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@flat_or_original
@pytest.mark.spec("PROG-68")
def test_a_part_of_a_unit_has_no_state_dict_of_its_own(keep: bool, strategy: ShardingStrategy) -> None:
    check_parts(keep=keep, strategy=strategy)
