"""Requirements about statements in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minifsdp_tools.cost import Job, cost_of

DOCS = Path(__file__).resolve().parents[2] / "docs"

pytestmark = pytest.mark.proof("text")


def says(page: str, *patterns: str) -> bool:
    text = " ".join((DOCS / page).read_text(encoding="utf-8").split())
    return all(re.search(pattern, text) for pattern in patterns)


@pytest.mark.spec("MIG-06")
def test_migration_page_to_fsdp2_names_ddp_in_place_of_no_shard() -> None:
    assert says("moving/from-fsdp1.md", r"`NO_SHARD` \| DDP")


@pytest.mark.spec("IGN-11")
def test_migration_page_calls_ignored_states_the_preferred_spelling() -> None:
    assert says("moving/from-fsdp1.md", r"`ignored_modules` is still accepted; `ignored_states`.*preferred spelling")


@pytest.mark.spec("SHARD-18")
def test_strategies_page_mentions_deprecated_no_shard() -> None:
    assert says("learn/strategies.md", r"torch calls `NO_SHARD` deprecated in favour of DDP")


@pytest.mark.spec("MP-30", "MP-23", "FS2-MP-06")
def test_the_page_on_precision_gives_its_advice() -> None:
    assert says(
        "learn/precision.md", r"\*experimental\*, `_module_classes_to_ignore`", r"layer norm that is rarely worth it"
    )
    assert says("learn/precision.md", r"`output_dtype`.*on the root only")


@pytest.mark.spec("SD-FULL-12", "SD-SHARD-05", "OSD-FULL-04", "SUMMON-13")
def test_checkpoint_page_explains_limits_of_each_form() -> None:
    page = "learn/checkpoints.md"
    assert says(
        page,
        r"a large model does not fit",
        r"rank 0 and the CPU, unit by unit",
        r"For larger models, use sharded",
        r"on the same ranks .*local state dicts",
    )
    assert says(page, r"the optimizer's own, not copies", r"Use `rank0_only=True`")
    assert "exercise rank_0_saves" in (DOCS / page).read_text()


@pytest.mark.spec("CLIP-04", "FWD-03", "FS2-META-04", "NEW-20")
def test_troubleshoot_warns_of_hangs_and_lost_gradients() -> None:
    page = "troubleshoot.md"
    assert says(
        page, r"All ranks must call it.*others hang", r"reference to the parameter that was taken before sharding"
    )
    assert says(
        page, r"def reset_parameters\(self\)", r"does not broadcast initial values.*TORCH_DISTRIBUTED_DEBUG=DETAIL"
    )


@pytest.mark.spec("TRAIN-26")
def test_migration_page_from_ddp_keeps_the_learning_rate() -> None:
    assert says("moving/from-ddp.md", r"learning rate stays.*is an option when large batches.*nothing to do with FSDP")


@pytest.mark.spec("COST-09", "COST-11")
def test_calculator_page_gives_example_and_no_guarantee() -> None:
    page = "tools/calculator.md"
    assert says(
        page, r"7 billion parameters in float32 with Adam.*\*\*112 GB\*\*.*\*\*14 GB\*\*", r"do not predict the gain"
    )
    assert says(page, r"up to 4 times, about 30 %, 2 to 10 %, are its authors' observations")
    # "Stored" means the same in the text and in the numbers: without gradients.
    example = cost_of(Job(units=[[(7000, 1_000_000)]], num_shards=8))
    stored = f"{example.stored / 1e9:g} GB"
    assert says(page, rf"Of these, {stored} are stored between steps; the gradients, one quarter, are freed")
    assert example.after_backward == 14e9


@pytest.mark.spec("NEW-18")
def test_unsupported_methods_are_listed() -> None:
    names = ["set_custom_all_gather", "set_custom_reduce_scatter", "set_allocate_memory_from_process_group_for_comm"]
    names += [
        "set_symm_mem_for_comm",
        "set_separate_reduce_scatter_group",
        "set_reduce_scatter_max_input_buffers",
        "dp_mesh_dims",
    ]
    assert says("moving/since-2.13.md", *[f"`{name}`" for name in names])
