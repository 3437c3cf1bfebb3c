"""The number of ranks on a node, on machines where the ranks do not see the same number of accelerators."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from minifsdp.cases.node_groups import node_size


@pytest.mark.spec("HYB-03")
@pytest.mark.pure
@pytest.mark.parametrize(("num_visible", "num_ranks"), [(1, 8), (8, 4)], ids=["each sees its own", "fewer ranks"])
def test_a_node_has_the_ranks_of_the_launcher(
    num_visible: int, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = SimpleNamespace(device_count=lambda: num_visible)
    monkeypatch.setattr(torch, "get_device_module", lambda _: machine)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
    assert node_size(torch.device("cuda")) == num_ranks
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert node_size(torch.device("cuda")) == num_visible
