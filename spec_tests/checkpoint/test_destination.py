"""``state_dict(destination=..., prefix=...)``: entries of other models, and the versions of modules."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.checkpoint.checkpoints import FULL, LOCAL, SHARDED, flat_or_original
from spec_tests.harness import device, ranks
from spec_tests.subject import FullStateDictConfig, ShardedStateDictConfig
from spec_tests.subject import FullyShardedDataParallel as FSDP

FIRST_ONLY = FullStateDictConfig(rank0_only=True)


def filled() -> Any:
    """A dict that already contains another model of the same checkpoint."""
    state: Any = OrderedDict()
    state._metadata = OrderedDict()
    return nn.BatchNorm1d(1).state_dict(destination=state, prefix="other.")


@pytest.mark.spec("SAVE-02")
@pytest.mark.parametrize("prefix", ["", "mine.", "other."])
@flat_or_original
@ranks(2)
def test_with_rank0_only_a_rank_drops_only_the_entries_of_its_model(keep: bool, prefix: str) -> None:
    options: Any = {"use_orig_params": keep, "device_id": device()}
    model = FSDP(nn.Sequential(FSDP(nn.Linear(3, 4), **options), nn.BatchNorm1d(4)), **options)
    FSDP.set_state_dict_type(model, FULL, FIRST_ONLY)
    state = filled()
    before = dict(state)
    returned = model.state_dict(destination=state, prefix=prefix)
    assert returned is state
    assert all(state[key] is value for key, value in before.items())
    mine = {prefix + key for key in nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).state_dict()}
    assert set(state) - set(before) == (mine if dist.get_rank() == 0 else set())


@pytest.mark.spec("SAVE-02")
@flat_or_original
@ranks(2)
def test_model_does_not_keep_the_entries_of_another_model(keep: bool) -> None:
    model = FSDP(nn.Linear(3, 4), use_orig_params=keep, device_id=device())
    state = filled()
    entry = weakref.ref(state["other.running_mean"])
    model.state_dict(destination=state)
    del state
    gc.collect()
    assert entry() is None


@pytest.mark.spec("SD-FULL-13")
@flat_or_original
@ranks(2)
def test_plain_module_around_a_wrapper_chooses_strict_after_a_strict_load(keep: bool) -> None:
    model = FSDP(nn.Linear(3, 4), use_orig_params=keep, device_id=device())
    model.load_state_dict(model.state_dict())
    found = nn.Sequential(model).load_state_dict({"0.bias": torch.ones(4)}, strict=False)
    assert found.missing_keys == ["0.weight"]
    with FSDP.summon_full_params(model):
        assert torch.equal(model.module.bias.cpu(), torch.ones(4))


@pytest.mark.spec("SAVE-02")
@ranks(2)
def test_rank0_only_keeps_shards_of_inner_unit_on_every_rank() -> None:
    model = FSDP(nn.Sequential(FSDP(nn.Linear(3, 4), device_id=device()), nn.Linear(4, 2)), device_id=device())
    FSDP.set_state_dict_type(model, FULL, FIRST_ONLY)
    FSDP.set_state_dict_type(model.module[0], SHARDED, ShardedStateDictConfig(_use_dtensor=True))
    rows = ["0.weight", "0.bias"]
    saved = model.state_dict()
    assert list(saved) == [*rows, *(["1.weight", "1.bias"] if dist.get_rank() == 0 else [])]
    assert saved["0.weight"].full_tensor().shape == (4, 3)


@pytest.mark.spec("SAVE-01", "SAVE-02")
@pytest.mark.parametrize("part", ["wrapper", "plain module around it"])
@ranks(2)
def test_part_of_wrapped_model_saves_under_prefix(part: str) -> None:
    model = FSDP(nn.Sequential(nn.Sequential(FSDP(nn.BatchNorm1d(4), device_id=device()))), device_id=device())
    model(torch.randn(4, 4, device=device()))
    FSDP.set_state_dict_type(model, FULL, FIRST_ONLY)
    around = model.module[0]
    saved_part, prefix = (around[0], "other.0.") if part == "wrapper" else (around, "other.")
    saved = saved_part.state_dict(destination=filled(), prefix=prefix)
    assert "other.running_mean" in saved
    keys = {"other.0." + key for key in nn.BatchNorm1d(4).state_dict()}
    assert keys & set(saved) == (keys if dist.get_rank() == 0 else set())
    mean = around[0].module.running_mean
    assert dist.get_rank() or saved["other.0.running_mean"].data_ptr() != mean.data_ptr()


@pytest.mark.spec("SAVE-02")
@ranks(2)
def test_entries_of_another_model_are_not_copied() -> None:
    plain = nn.Linear(3, 4).to(device())
    state: Any = {"theirs": plain.weight}
    FSDP(nn.Sequential(plain), ignored_modules=[plain]).state_dict(destination=state)
    assert state["theirs"] is plain.weight
    assert state["0.weight"].data_ptr() != plain.weight.data_ptr()


class Versioned(nn.Module):
    """Its second version stores the weight with the opposite sign."""

    _version = 2

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if (metadata.get("version") or 1) < 2 and prefix + "weight" in state:
            state[prefix + "weight"] = -state[prefix + "weight"]
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def plain() -> nn.Module:
    return nn.Sequential(Versioned(Versioned()), Versioned())


def wrapped(keep: bool) -> FSDP:
    inner = Versioned(FSDP(Versioned(), use_orig_params=keep, device_id=device()))
    return FSDP(
        nn.Sequential(FSDP(inner, use_orig_params=keep, device_id=device()), Versioned()),
        use_orig_params=keep,
        device_id=device(),
    )


def weights(model: nn.Module) -> list[list[float]]:
    return [p.tolist() for p in model.parameters()]


NEW = [[0.0, 1.0, 2.0, 3.0]] * 3
OLD = [[-0.0, -1.0, -2.0, -3.0]] * 3


@pytest.mark.spec("SAVE-03")
@flat_or_original
@ranks(2)
def test_versions_of_modules_are_kept_from_and_to_a_plain_model(keep: bool) -> None:
    model, target = wrapped(keep), plain()
    target.load_state_dict(model.state_dict())
    assert weights(target) == NEW
    state = plain().state_dict()
    model.load_state_dict(state)
    assert list(state._metadata) == list(plain().state_dict()._metadata), "the caller's dict is as it was"
    with FSDP.summon_full_params(model):
        assert weights(model) == NEW
    for version in state._metadata.values():
        version["version"] = 1
    model.load_state_dict(state)
    with FSDP.summon_full_params(model):
        assert weights(model) == OLD


@pytest.mark.spec("SAVE-03")
@pytest.mark.parametrize("form", [FULL, SHARDED, LOCAL], ids=["full", "sharded", "local"])
@flat_or_original
@ranks(2)
def test_versions_of_modules_are_kept_between_wrapped_models(keep: bool, form: Any) -> None:
    model = wrapped(keep)
    around = nn.Sequential(FSDP(Versioned(), use_orig_params=keep, device_id=device()))
    for saving in (model, around):
        with FSDP.state_dict_type(saving, form):
            state = saving.state_dict()
            saving.load_state_dict(state)
        with FSDP.summon_full_params(saving):
            assert weights(saving) == NEW[: len(list(saving.parameters()))]


@pytest.mark.spec("SAVE-03")
@ranks(2)
def test_prefix_of_a_state_dict_is_kept_in_the_paths_of_its_versions() -> None:
    state = wrapped(keep=True).state_dict(prefix="model.")
    expected = plain().state_dict(prefix="model.")
    assert all(state._metadata[path] == version for path, version in expected._metadata.items())
