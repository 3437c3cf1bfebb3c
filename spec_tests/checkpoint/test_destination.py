"""``state_dict(destination=..., prefix=...)``: entries of other models, versions of modules, and parts of units."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.checkpoint import checkpoints
from spec_tests.checkpoint.checkpoints import FULL, LOCAL, SHARDED, flat_or_original, make
from spec_tests.harness import device, ranks
from spec_tests.models.running import batch
from spec_tests.models.sharding import FLAT_STRATEGIES, NO_SHARD
from spec_tests.models.values import assert_same, full_values
from spec_tests.subject import FullStateDictConfig, ShardingStrategy
from spec_tests.subject import FullyShardedDataParallel as FSDP


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
    FSDP.set_state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True))
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


@pytest.mark.spec("SAVE-02")
@ranks(2)
def test_rank0_only_keeps_shards_of_inner_unit_on_every_rank() -> None:
    model = FSDP(nn.Sequential(FSDP(nn.Linear(3, 4), device_id=device()), nn.Linear(4, 2)), device_id=device())
    FSDP.set_state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True))
    FSDP.set_state_dict_type(model.module[0], SHARDED)
    rows = ["0.weight", "0.bias"]
    saved = model.state_dict()
    assert list(saved) == [*rows, *(["1.weight", "1.bias"] if dist.get_rank() == 0 else [])]
    assert checkpoints.gathered(saved["0.weight"]).shape == (4, 3)


def saved_part(part: str) -> tuple[dict[str, Any], Tensor]:
    """The state dict of a wrapper inside a wrapped model, or of a plain module around it, and the wrapper's buffer."""
    model = FSDP(nn.Sequential(nn.Sequential(FSDP(nn.BatchNorm1d(4), device_id=device()))), device_id=device())
    model(torch.randn(4, 4, device=device()))
    FSDP.set_state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True))
    around = model.module[0]
    module, prefix = (around[0], "other.0.") if part == "wrapper" else (around, "other.")
    return module.state_dict(destination=filled(), prefix=prefix), around[0].module.running_mean


@pytest.mark.spec("SAVE-02")
@pytest.mark.parametrize("part", ["wrapper", "plain module around it"])
@ranks(2)
def test_part_of_wrapped_model_saves_under_prefix(part: str) -> None:
    saved, _ = saved_part(part)
    assert "other.running_mean" in saved
    keys = {"other.0." + key for key in nn.BatchNorm1d(4).state_dict()}
    assert keys & set(saved) == (keys if dist.get_rank() == 0 else set())


@pytest.mark.spec("SAVE-01")
@pytest.mark.parametrize("part", ["wrapper", "plain module around it"])
@ranks(2)
def test_part_of_wrapped_model_is_saved_as_a_copy(part: str) -> None:
    saved, mean = saved_part(part)
    assert dist.get_rank() or saved["other.0.running_mean"].data_ptr() != mean.data_ptr()


@pytest.mark.spec("SAVE-02")
@ranks(2)
def test_entries_of_another_model_are_not_copied() -> None:
    plain = nn.Linear(3, 4).to(device())
    state: Any = {"theirs": plain.weight}
    FSDP(nn.Sequential(plain), ignored_modules=[plain]).state_dict(destination=state)
    assert state["theirs"] is plain.weight


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
    assert list(state._metadata) == list(plain().state_dict()._metadata), "the caller's dict is not changed"
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


PARTS = ("first.0", "second.0", "head", "")


@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@flat_or_original
@pytest.mark.spec("PROG-68")
@ranks(2)
def test_a_part_of_a_unit_has_no_state_dict_of_its_own(keep: bool, strategy: ShardingStrategy) -> None:
    model = checkpoints.wrapped(make(), use_orig_params=keep, sharding_strategy=strategy)
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
