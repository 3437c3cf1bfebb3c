"""``backward(inputs=...)`` computes the gradients of the parameters that the program lists."""

from __future__ import annotations

from typing import Any

import pytest

from spec_tests.harness import ranks
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch, iterate, loss_of
from spec_tests.models.sharding import sharded, wrapped
from spec_tests.models.values import assert_same, full_gradients


@pytest.mark.spec("PROG-20", "PROG-21")
@pytest.mark.filterwarnings("ignore:.*frozen parameters")
@pytest.mark.parametrize("api", ["original", "fully_shard"])
@ranks(2)
def test_all_trained_parameters_may_be_listed_if_others_are_frozen(api: str) -> None:
    """Defect: the frozen parameters of a unit count as parameters that the program has left out."""
    found = []
    for lists_them in (False, True):
        plain: Any = seeded()
        for layer in (plain.enter, plain.blocks[1].linear):
            layer.bias.requires_grad_(False)
        model = wrapped(plain, use_orig_params=True) if api == "original" else sharded(plain)
        if lists_them:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            loss_of(model(batch())).backward(inputs=trained)
        else:
            iterate(model)
        found.append(full_gradients(model))
    assert "blocks.1.linear.bias" not in found[0]
    assert_same(found[1], found[0], bitwise=True)
