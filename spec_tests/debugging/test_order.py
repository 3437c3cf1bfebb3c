"""An order of units that differs between ranks only in a later iteration."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import minifsdp
from spec_tests.harness import ranks
from spec_tests.models.apis import Api, all_apis
from spec_tests.models.running import iterate

ORDERS = ((0, 1, 2, 3), (0, 2, 1, 3))


@pytest.mark.spec("DEBUG-07")
@all_apis
@ranks(2)
def test_later_order_difference_is_reported_on_both_ranks(api: Api) -> None:
    model = api.shard()
    iterate(model)
    iterate(model)
    with minifsdp.debug("order"):
        iterate(model)
        with pytest.raises(RuntimeError, match=r"different collectives(.|\n)*'blocks\.1'(.|\n)*'blocks\.2'"):
            iterate(model, order=ORDERS[dist.get_rank()])
        # Training continues.
        iterate(model, order=ORDERS[1])
