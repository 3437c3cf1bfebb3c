"""``set_keep_unsharded_storage``: addresses of parameters that stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import minifsdp
from spec_tests.harness import device, ranks

LIBRARIES = {"minifsdp": minifsdp}
if hasattr(torch_fsdp.FSDPModule, "set_keep_unsharded_storage"):
    LIBRARIES["torch"] = torch_fsdp


def blocks(library: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(device())
    library.fully_shard(model[0])
    return library.fully_shard(model)


@pytest.mark.spec("NEW-29")
@pytest.mark.parametrize("library", LIBRARIES)
@ranks(2)
def test_addresses_stay_the_same_and_values_are_gathered_again(library: str) -> None:
    model = blocks(LIBRARIES[library])
    model.set_keep_unsharded_storage(True)
    addresses = []
    for factor in (1.0, 3.0):
        model[0].unshard()
        addresses.append(model[0].weight.data_ptr())
        whole = model[0].weight.detach().clone()
        model[0].reshard()
        assert torch.equal(whole, model[0].weight.full_tensor())
        with torch.no_grad():
            model[0].weight.mul_(factor + 1)
    assert addresses[0] == addresses[1]


@pytest.mark.spec("NEW-29")
@pytest.mark.parametrize("recurse", [True, False])
@ranks(2)
def test_memory_is_kept_for_the_chosen_units_and_freed_by_false(recurse: bool) -> None:
    model = blocks(minifsdp)
    storages = []
    for module in (model, model[0]):
        module.unshard()
    for layer in model:
        storages.append(layer.weight.untyped_storage())

    model.set_keep_unsharded_storage(True, recurse=recurse)
    for module in (model, model[0]):
        module.reshard()

    is_kept = [storage.nbytes() > 0 for storage in storages]
    assert is_kept == [recurse, True]
    model(torch.ones(2, 4, device=device())).sum().backward()
    assert [storage.nbytes() > 0 for storage in storages] == is_kept
    model.set_keep_unsharded_storage(False)
    assert [storage.nbytes() for storage in storages] == [0, 0]
