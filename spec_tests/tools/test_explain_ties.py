"""The warning of `explain` for a parameter that is used in several places."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from minifsdp import explain
from spec_tests.harness import ranks
from spec_tests.models.apis import ALL_APIS, Api
from spec_tests.models.modules import WIDTH, seeded


class SharedBias(nn.Module):
    """Seven layers with one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(7)))
        for layer in self.layers[1:]:
            layer.bias = self.layers[0].bias

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.spec("EXPLAIN-08")
@pytest.mark.parametrize("api", [*ALL_APIS, None], ids=str)
@ranks(2)
def test_the_warning_has_all_names_of_the_parameter(api: Api | None) -> None:
    model = seeded(SharedBias) if api is None else api.unit(seeded(SharedBias))
    (advice,) = [advice for advice in explain(model).warnings if advice.kind == "tied"]
    for number in range(7):
        assert f"layers.{number}.bias" in advice.cause
    assert not [number for number in range(7) if f"layers.{number}.weight" in advice.cause]
