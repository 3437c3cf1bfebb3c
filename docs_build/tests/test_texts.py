"""Requirements about statements in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs_build.reading.order import path_of
from docs_build.reading.source import find_function
from minifsdp_tools.cost import Job, cost_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
# Requirements, the page, and patterns of its text.
TEXTS = [
    ("MIG-06", "moving/from-fsdp1.md", r"`NO_SHARD` \| DDP"),
    ("IGN-11", "moving/from-fsdp1.md", r"`ignored_modules` is still accepted; `ignored_states`.*preferred spelling"),
    ("SHARD-18", "learn/strategies.md", r"torch calls `NO_SHARD` deprecated in favour of DDP"),
    ("MP-30", "learn/precision.md", r"\*experimental\*, `_module_classes_to_ignore`"),
    ("MP-23", "learn/precision.md", r"layer norm that is rarely worth it"),
    ("FS2-MP-06", "learn/precision.md", r"`output_dtype`.*on the root only"),
    ("SD-FULL-12", "learn/checkpoints.md", r"a large model does not fit.*rank 0 and the CPU, unit by unit"),
    ("SD-FULL-12", "learn/checkpoints.md", r"For larger models, use sharded"),
    ("SD-FULL-12", "learn/checkpoints.md", r"exercise rank_0_saves"),
    ("SD-SHARD-05", "learn/checkpoints.md", r"on the same ranks .*local state dicts"),
    ("OSD-FULL-04", "learn/checkpoints.md", r"the optimizer's own, not copies"),
    ("SUMMON-13", "learn/checkpoints.md", r"Use `rank0_only=True`"),
    ("CLIP-04", "troubleshoot.md", r"All ranks must call it.*others hang"),
    ("FWD-03", "troubleshoot.md", r"reference to the parameter that was taken before sharding"),
    ("FS2-META-04", "troubleshoot.md", r"def reset_parameters\(self\)"),
    ("NEW-20", "troubleshoot.md", r"does not broadcast initial values.*TORCH_DISTRIBUTED_DEBUG=DETAIL"),
    (
        "TRAIN-26",
        "moving/from-ddp.md",
        r"learning rate stays.*option when large batches.*nothing to do with FSDP",
    ),
    ("COST-09", "tools/calculator.md", r"7 billion parameters in float32 with Adam.*\*\*112 GB\*\*.*\*\*14 GB\*\*"),
    ("COST-11", "tools/calculator.md", r"do not predict the gain"),
    ("COST-11", "tools/calculator.md", r"up to 4 times, about 30 %, 2 to 10 %, are its authors' observations"),
]

pytestmark = pytest.mark.proof("text")


@pytest.mark.parametrize(
    ("page", "pattern"), [pytest.param(page, text, marks=pytest.mark.spec(row)) for row, page, text in TEXTS]
)
def test_page_gives_its_advice(page: str, pattern: str) -> None:
    assert re.search(pattern, " ".join((DOCS / page).read_text(encoding="utf-8").split()))


@pytest.mark.spec("COST-09")
def test_stored_bytes_of_the_example_are_those_of_the_package() -> None:
    example = cost_of(Job(units=[[(7000, 1_000_000)]], num_shards=8))
    assert example.after_backward == 14e9
    text = " ".join((DOCS / "tools" / "calculator.md").read_text(encoding="utf-8").split())
    # "Stored" means the same in the text and in the numbers: without gradients.
    assert (
        f"Of these, {example.stored / 1e9:g} GB are stored between steps; the gradients, one quarter, are freed" in text
    )


LISTINGS = re.compile(r"\{\{ code (\S+) (\S+) \}\}")


def code_of(module: str, function: str) -> str:
    """A function as a listing shows it, without its docstring."""
    first, last, docstring = find_function(module, function)
    lines = enumerate(path_of(module).read_text(encoding="utf-8").splitlines(), 1)
    return "\n".join(line for n, line in lines if first <= n <= last and n not in docstring)


@pytest.mark.parametrize("page", sorted((DOCS / "learn").glob("*.md")), ids=lambda page: page.stem)
def test_listings_have_the_names_and_steps_that_the_text_above_them_announces(page: Path) -> None:
    pieces = re.split(r"\n\n(?!\{\{ code)", page.read_text(encoding="utf-8"))
    missing = []
    # In a piece, listings follow a paragraph. A paragraph without a listing announces the next ones.
    for place, piece in enumerate(pieces):
        text = LISTINGS.sub("", piece)
        if not re.search(r"[Ii]n the (code|package)\b|[Tt]he (next|two) functions?\b", text):
            continue
        shown = next((found for one in pieces[place:] if (found := LISTINGS.findall(one))), [])
        code = "\n".join(code_of(*names) for names in shown)
        steps = [f"# {number}." for number in re.findall(r"(?:step|stage) (\d)", text)]
        names = re.findall(r"`(\w+)`", text)
        missing += [one for one in [*names, *steps] if one not in code]
    assert missing == []
