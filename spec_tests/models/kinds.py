"""All combinations of API, strategy and kind of parameters by name, for tests that compare each with a plain model.

A name has two words: an API (the wrapper with ``flat`` or ``original`` parameters, or ``fully_shard``), and a strategy.
For ``fully_shard`` the second word can also be the value of ``reshard_after_forward``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from torch import nn

from spec_tests.harness import device
from spec_tests.models.apis import FULLY_SHARD, ORIGINALS, WRAPPED
from spec_tests.models.sharding import FLAT_STRATEGIES
from spec_tests.subject import ShardingStrategy

APIS = {"flat": WRAPPED, "original": ORIGINALS, "fully_shard": FULLY_SHARD}
RESHARDS = {"True": "FULL_SHARD", "False": "SHARD_GRAD_OP"}
KINDS = [
    *(f"{parameters} {strategy.name}" for parameters in ("flat", "original") for strategy in FLAT_STRATEGIES),
    "fully_shard True",
    "fully_shard False",
]
every_kind = pytest.mark.parametrize("kind", KINDS)


def shard(kind: str, model: nn.Module, units: Iterable[str] = (), **options: Any) -> Any:
    """Shards the submodules with the names ``units``, and the model itself."""
    name, option = kind.split()
    api, strategy = APIS[name], ShardingStrategy[RESHARDS.get(option, option)]
    if api == FULLY_SHARD:
        model.to(device())
        if option in RESHARDS:
            # Also for the root.
            options.setdefault("reshard_after_forward", option == "True")
    else:
        options.setdefault("device_id", device())
    for unit in units:
        model.set_submodule(unit, api.unit(model.get_submodule(unit), strategy=strategy, **options))
    return api.unit(model, strategy=strategy, **options)
