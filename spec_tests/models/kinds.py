"""All combinations of front end, strategy and kind of parameters, for tests that compare each with a plain model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from torch import nn

from spec_tests.harness import device
from spec_tests.subject import FullyShardedDataParallel, ShardingStrategy, fully_shard

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
# The wrapper with flat or original parameters, and `fully_shard` with the value of `reshard_after_forward`.
KINDS = [
    *(f"{parameters} {strategy}" for parameters in ("flat", "original") for strategy in STRATEGIES),
    "fully_shard True",
    "fully_shard False",
]
every_kind = pytest.mark.parametrize("kind", KINDS)


def shard(kind: str, model: nn.Module, units: Iterable[str] = ()) -> Any:
    """Shards the submodules with the names ``units``, and the model itself."""
    api, option = kind.split()
    if api == "fully_shard":
        model.to(device())
        for module in [*map(model.get_submodule, units), model]:
            fully_shard(module, reshard_after_forward=option == "True")
        return model
    options: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[option],
        "use_orig_params": api == "original",
        "device_id": device(),
    }
    for name in units:
        model.set_submodule(name, FullyShardedDataParallel(model.get_submodule(name), **options))
    return FullyShardedDataParallel(model, **options)
