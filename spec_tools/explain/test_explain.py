"""``minifsdp.explain(model)``: the units, the shards of each rank, the warnings, and the output."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard

import minifsdp
from minifsdp import explain
from minifsdp_tools.explain import Explanation
from spec_tests import subject
from spec_tests.harness import device, ranks
from spec_tests.models import MODELS
from spec_tests.models.apis import ALL_APIS, FULLY_SHARD, ORIGINALS, Api, all_apis, both_apis
from spec_tests.models.modules import UNITS, Block, Nested, NormedBlock, Stack, Tied, chain, seeded
from spec_tests.models.running import iterate
from spec_tests.models.sharding import grid_mesh, line_mesh, sharded, wrapped
from spec_tests.models.torch_names import ShardPlacementResult
from spec_tests.subject import FullyShardedDataParallel, fully_shard, trace


def kinds(found: Explanation) -> list[str]:
    return [advice.kind for advice in found.warnings]


# ---- no communication, no changes -----------------------------------------------------------------------------------


@pytest.mark.spec("EXPLAIN-01")
@all_apis
@ranks(2)
def test_explain_on_one_rank_does_not_change_training(api: Api) -> None:
    losses: list[list[float]] = []
    for explains in (True, False):
        model = api.shard()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for step in range(2):
            # The first rank alone calls it.
            if explains and dist.get_rank() == 0:
                with trace.record() as recorder:
                    explain(model)
                assert recorder.events == []
            losses[-1].append(iterate(model, step, optimizer))
    assert losses[0] == losses[1]


@pytest.mark.spec("EXPLAIN-01")
@ranks(2)
def test_explain_gives_the_same_result_for_unsharded_parameters() -> None:
    model = sharded(seeded())
    before = str(explain(model))
    model.unshard()
    assert str(explain(model)) == before
    flat = wrapped(seeded(), use_orig_params=True)
    before = str(explain(flat))
    with FullyShardedDataParallel.summon_full_params(flat):
        assert str(explain(flat)) == before


# ---- shards of each rank --------------------------------------------------------------------------------------------


@pytest.mark.spec("EXPLAIN-02")
@pytest.mark.parametrize("api", [ORIGINALS, FULLY_SHARD], ids=str)
@pytest.mark.parametrize("name", ["mlp", "uneven", "nested", "conv", "transformer", "lstm", "tied", "batch_norm"])
@ranks(2)
def test_each_rank_owns_the_explained_elements(name: str, api: Api) -> None:
    info, rank = MODELS[name], dist.get_rank()
    plain = info.build()
    originals = {key: parameter.numel() for key, parameter in plain.named_parameters()}
    model = api.shard(plain, unit_classes=info.unit_classes)
    units = explain(model).units
    reported = {parameter.name: parameter for unit in units for parameter in unit.parameters}
    assert {key: sum(parameter.owned.values()) for key, parameter in reported.items()} == originals
    stored = {
        key.replace("_fsdp_wrapped_module.", ""): (p.to_local() if isinstance(p, DTensor) else p).numel()
        for key, p in model.named_parameters()
    }
    assert {key: reported[key].owned.get(rank, 0) for key in stored} == stored
    assert sum(unit.owned_bytes.get(rank, 0) for unit in units) == 4 * sum(stored.values())


@pytest.mark.spec("EXPLAIN-02")
@all_apis
@ranks(2)
def test_units_have_their_names_their_sizes_and_their_dtypes(api: Api) -> None:
    found = explain(api.shard())
    assert [unit.name for unit in found.units] == list(UNITS)
    assert [unit.numel for unit in found.units] == [56, 42, 42, 42, 42]
    assert [unit.type for unit in found.units] == ["Stack", *["Block"] * 4]
    assert found.model == "Stack"
    assert found.numel == 56 + 4 * 42
    assert found.largest.is_root
    assert {unit.ranks for unit in found.units} == {(0, 1)}
    assert {dtype for unit in found.units for dtype in (unit.stored, unit.compute, unit.reduce)} == {torch.float32}
    assert found.rank == dist.get_rank()


@pytest.mark.spec("EXPLAIN-02")
@ranks(2)
def test_explain_shows_all_gather_bytes() -> None:
    for model in (wrapped(chain(), mixed_precision=subject.MixedPrecision(torch.bfloat16)), sharded(seeded())):
        reported = {unit.name: unit.gathered_bytes for unit in explain(model).units}
        with trace.record() as recorder:
            model(torch.ones(1, 3 if "0" in reported else 6, device=device()))
        gathered = {event.unit: event.num_bytes for event in recorder.events if event.kind == "AG"}
        assert gathered
        assert gathered == reported


@pytest.mark.spec("EXPLAIN-02", "EXPLAIN-03")
@ranks(2)
def test_explain_shows_other_shard_dim() -> None:
    layer = nn.Linear(6, 3, bias=False, device=device())
    found = explain(fully_shard(layer, shard_placement_fn=lambda parameter: Shard(1)))
    (parameter,) = found.units[0].parameters
    assert (parameter.shape, parameter.dim, parameter.owned) == ((3, 6), 1, {0: 9, 1: 9})
    # Sharding the three rows would have needed padding.
    assert found.units[0].gathered_bytes == found.job.sizes[0] == 4 * 18


@pytest.mark.spec("EXPLAIN-02", "EXPLAIN-11")
@ranks(4)
def test_experts_may_be_on_another_mesh() -> None:
    info = FSDPMeshInfo(grid_mesh()["shard"], 0)
    block = Block().to(device())
    weight = block.linear.weight
    place: Any = lambda p: ShardPlacementResult(None, info) if p is weight else None  # noqa: E731
    fully_shard(block, mesh=line_mesh(), shard_placement_fn=place)
    others = [fully_shard(Block().to(device())) for _ in range(2)]
    found = explain(nn.Sequential(block, *others))
    of_weight, of_bias = found.units[0].parameters
    assert "0 has a different number of ranks, mesh from most of the bytes" in found.assumptions[0]
    pair = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}[dist.get_rank()]
    assert of_weight.owned == dict.fromkeys(pair, 18)
    assert of_bias.owned == {0: 2, 1: 2, 2: 2, 3: 0}


# ---- planned units --------------------------------------------------------------------------------------------------


def assert_planned_as_made(planned: Explanation, made: Explanation) -> None:
    assert [replace(unit, is_planned=False) for unit in planned.units] == list(made.units)
    assert planned.cost == made.cost


@pytest.mark.spec("EXPLAIN-05")
@pytest.mark.parametrize("kind", ["cpu", "meta"])
@ranks(2)
def test_explain_predicts_units_of_plain_model(kind: str) -> None:
    with torch.device(device() if kind == "cpu" else "meta"):
        model = Stack()
    planned = explain(model)
    assert [unit.is_planned for unit in planned.units] == [True]
    assert "Stack itself is not sharded yet" in str(planned)
    made = explain(fully_shard(model))
    assert_planned_as_made(planned, made)
    assert "not sharded yet" not in str(made)


@pytest.mark.spec("EXPLAIN-05")
@both_apis
@ranks(2)
def test_explain_plans_remaining_params_like_existing_units(api: Api) -> None:
    model, precision = seeded(), {"param_dtype": torch.bfloat16}
    for number, block in enumerate(model.blocks):
        model.blocks[number] = api.unit(block, precision=precision)
    planned = explain(model)
    assert_planned_as_made(planned, explain(api.unit(model, precision=precision)))


@pytest.mark.spec("EXPLAIN-05")
def test_without_ranks_a_model_can_be_planned_for_any_number() -> None:
    with torch.device("meta"):
        model = Stack()
    assert explain(model).job.num_shards == 1
    found = explain(model, num_shards=512)
    assert found.job.num_shards == len(found.units[0].ranks) == 512
    # Fewer rows than ranks: padded to one row for each rank.
    assert found.units[0].owned_bytes[0] > found.units[0].owned_bytes[511] == 0


# ---- warnings -------------------------------------------------------------------------------------------------------


@pytest.mark.spec("EXPLAIN-06")
@ranks(2)
def test_unit_with_most_of_the_model_gives_a_warning() -> None:
    (advice,) = explain(fully_shard(seeded())).warnings
    assert (advice.kind, advice.units) == ("dominant", ("(root)",))
    assert "100 % of the parameters" in advice.cause
    assert "896 B of parameters at once" in advice.cause
    assert "the 4 modules blocks.*" in advice.remedy
    assert "dominant" not in kinds(explain(sharded(seeded())))


@pytest.mark.spec("EXPLAIN-06")
@pytest.mark.parametrize(("sizes", "expected"), [((600, 400), []), ((602, 398), ["dominant"])])
@ranks(2)
def test_sixty_percent_is_the_limit_for_a_dominant_unit(sizes: tuple[int, int], expected: list[str]) -> None:
    model = nn.Sequential(*(nn.Linear(size, 1, bias=False) for size in sizes)).to(device())
    wrapper = FullyShardedDataParallel(model, auto_wrap_policy=subject.ModuleWrapPolicy({nn.Linear}))
    assert kinds(explain(wrapper)) == expected


class Wide(nn.Module):
    """Layers with the given numbers of elements, on the meta device."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, 1, bias=False, device="meta") for size in sizes)


def each_a_unit(*sizes: int) -> Explanation:
    model = Wide(*sizes)
    for layer in model.layers:
        fully_shard(layer)
    return explain(model)


@pytest.mark.spec("EXPLAIN-07")
@ranks(2)
def test_units_much_smaller_than_the_largest_share_one_warning() -> None:
    found = each_a_unit(1_000_000, 1_000_000, 99_998, 100_002, 64)
    (advice,) = found.warnings
    assert (advice.kind, advice.units) == ("small", ("layers.2", "layers.4"))
    assert "2 unit(s) with 99,998 parameters at most" in advice.cause
    assert "33 million" in advice.cause
    assert "peak memory does not grow" in advice.remedy


@pytest.mark.spec("EXPLAIN-07")
@pytest.mark.parametrize(
    ("sizes", "num_small"),
    [
        # A hundredth of the model.
        ([1000] * 99, 0),
        ([1000] * 101, 101),
        # No unit above the limit of the paper is too small.
        ([400_000_000] * 2 + [33_000_002], 0),
        ([400_000_000] * 2 + [32_999_998], 1),
    ],
)
@ranks(2)
def test_units_of_less_than_a_hundredth_of_the_model_or_33_million_are_small(sizes: list[int], num_small: int) -> None:
    found = each_a_unit(*sizes)
    assert [(advice.kind, len(advice.units)) for advice in found.warnings] == [("small", num_small)][: num_small > 0]
    if num_small == 101:
        assert "layers.0, layers.1, layers.2, layers.3 and 97 more" in str(found)


class SharedBias(nn.Module):
    """Seven layers with one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(7)))
        for layer in self.layers:
            layer.bias = self.layers[0].bias


@pytest.mark.spec("EXPLAIN-08")
@pytest.mark.parametrize("api", [*ALL_APIS, None], ids=str)
@ranks(2)
def test_tied_weights_are_warned_of_with_all_names_and_counted_once(api: Api | None) -> None:
    model = SharedBias().to(device())
    num = sum(p.numel() for p in model.parameters())
    found = explain(model if api is None else api.shard(model))
    (advice,) = [advice for advice in found.warnings if advice.kind == "tied"]
    assert [number for number in range(7) if f"layers.{number}.bias" in advice.cause] == [*range(7)]
    assert not [number for number in range(7) if f"layers.{number}.weight" in advice.cause]
    assert advice.units == ("(root)",)
    assert found.numel == num


@pytest.mark.spec("EXPLAIN-09")
@ranks(2)
def test_explain_warns_of_mixed_frozen_params_only_for_wrapper() -> None:
    model = seeded()
    model.blocks[1].linear.weight.requires_grad_(False)
    model.blocks[2].requires_grad_(False)
    (advice,) = [advice for advice in explain(model).warnings if advice.kind == "frozen"]
    assert "3 of its parameters are frozen" in advice.cause
    assert "frozen" not in kinds(explain(sharded(model)))


@pytest.mark.spec("EXPLAIN-10")
@ranks(2)
def test_batch_norm_in_low_precision_gives_a_warning() -> None:
    def of(**options: Any) -> list[str]:
        model = nn.Sequential(NormedBlock(), NormedBlock()).to(device())
        for block in model:
            fully_shard(block, **options)
        found = explain(fully_shard(model))
        return [text for advice in found.warnings if advice.kind == "batch-norm" for text in advice.units]

    assert of() == []
    assert of(mp_policy=subject.MixedPrecisionPolicy(torch.bfloat16)) == ["0", "1"]
    assert of(mp_policy=subject.MixedPrecisionPolicy(None, torch.bfloat16)) == []


@pytest.mark.spec("EXPLAIN-10", "EXPLAIN-11")
@ranks(2)
def test_explain_does_not_warn_about_wrapped_batch_norm() -> None:
    low = subject.MixedPrecision(param_dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="BatchNorm1d"):
        model = wrapped(nn.Sequential(NormedBlock(), NormedBlock()).to(device()), mixed_precision=low)
    found = explain(model)
    assert "batch-norm" not in kinds(found)
    assert "0.norm has a different compute dtype, reduce dtype from most" in found.assumptions[0]
    statistics = subject.MixedPrecision(buffer_dtype=torch.float16)
    by_hand = FullyShardedDataParallel(NormedBlock().to(device()), mixed_precision=statistics)
    assert "batch-norm" in kinds(explain(by_hand))


# ---- assumptions ----------------------------------------------------------------------------------------------------


def assumed(model: nn.Module) -> str:
    return " ".join(explain(model).assumptions)


@pytest.mark.spec("EXPLAIN-11")
@ranks(2)
def test_explain_lists_uncertain_assumptions() -> None:
    assert assumed(sharded(seeded())) == assumed(wrapped(seeded())) == ""
    nested = nn.Sequential(Nested()).to(device())
    fully_shard(nested[0].inner)
    fully_shard(nested[0])
    assert "0 contain other units" in assumed(fully_shard(nested))
    first = seeded()
    first.blocks[0].requires_grad_(False)
    assert "there may be less communication" in assumed(wrapped(first))
    spared = seeded()
    ignoring = FullyShardedDataParallel(spared, ignored_states=[spared.enter.bias, spared.leave.weight])
    assert "enter.bias, leave.weight (72 B) belong to no unit" in assumed(ignoring)
    kept = seeded()
    for number, block in enumerate(kept.blocks):
        fully_shard(block, reshard_after_forward=number > 0)
    assert "blocks.0 has a different resharding after forward from most" in assumed(fully_shard(kept))


# ---- output ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("EXPLAIN-12")
@ranks(2)
def test_the_text_fits_a_terminal_and_equal_units_share_a_line() -> None:
    text = str(explain(sharded(seeded())))
    assert max(map(len, text.splitlines())) <= 120
    lines = text.splitlines()
    assert lines[0] == "Stack: 224 parameters in 5 units, FULL_SHARD on 2 ranks"
    assert [line.split("  ")[0] for line in lines[2:5]] == ["unit", "(root)", "blocks.0 to blocks.3 (4)"]
    assert "largest unit: (root), 25 % of the parameters" in text
    assert "Adam" in text


@pytest.mark.spec("EXPLAIN-12", "SAVE-09")
@ranks(2)
def test_a_notebook_shows_tables_and_escapes_names() -> None:
    model = nn.Sequential()
    model.add_module("<script>alert('&')</script>", Block())
    model.add_module("tied", Tied())
    for part in model.to(device()):
        fully_shard(part)
    found = explain(fully_shard(model))
    page = found._repr_html_()
    assert "<script" not in page
    # Closed tags only.
    words = " ".join(ET.fromstring(f"<div>{page.replace('<br>', '<br/>')}</div>").itertext())
    for unit in found.units:
        assert unit.label in words
    for advice in found.warnings:
        assert advice.cause in words
        assert advice.remedy in words


@pytest.mark.spec("EXPLAIN-13")
def test_explain_refuses_unsupported_input() -> None:
    with pytest.raises(TypeError, match=r"expects an nn.Module, got an object of type list"):
        explain([Stack()])  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"does not support the optimizer 'adam'; the supported ones are .*Adam, AdamW"
    ):
        explain(Stack(), optimizer="adam")
    with pytest.raises(ValueError, match="Tanh has no parameters"):
        explain(nn.Tanh())
    assert minifsdp.explain is explain
