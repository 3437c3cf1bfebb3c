"""The problems: their texts contain no typed figures, and formulas written here give the same answers."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import string
import subprocess
import sys
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from docs_build.problems import chapters, recorded
from docs_build.problems.chapters import CHAPTERS, Problem, chapter, problems
from docs_build.problems.writing import number, written
from docs_build.reading.order import ROOT

FOLDER = ROOT / "docs_build" / "problems"
ALL = [problem for name in CHAPTERS for problem in problems(name)]

# Names that contain a digit. Everything else must be a placeholder.
NAMES = re.compile(r"\b(?:float32|bfloat16|FSDP[12])\b|[Rr]ank 0")
WORDS = re.compile(
    r"\b(?:three|four|five|six|seven|eight|nine|ten|twelve|twice|half|double|doubled|thirds?|quarters?|dozens?|hundreds?"
    r"|thousands?|millions?|billions?)\b",
    re.IGNORECASE,
)


def of(name: str) -> Problem:
    return next(problem for problem in ALL if problem.name == name)


def answer(name: str, **givens: Any) -> dict[str, Any]:
    """The figures of an answer, with other givens if there are any."""
    return of(name).solve(**{**of(name).givens, **givens})


def typed(template: str) -> list[str]:
    """The figures of a template that no placeholder produces."""
    prose = NAMES.sub("", "".join(literal for literal, *_ in string.Formatter().parse(template)))
    return re.findall(r"\S*\d\S*", prose) + WORDS.findall(prose)


# ---- the texts ----


@pytest.mark.spec("PROBLEMS-01")
def test_chapters_have_about_forty_problems_with_folded_answers() -> None:
    assert len(CHAPTERS) == 5
    assert 38 <= len(ALL) <= 46
    assert all(len(problems(name)) >= 7 for name in CHAPTERS)
    assert sum(bool(problem.hint) for problem in ALL) >= 10
    assert len({problem.name for problem in ALL}) == len(ALL)
    for name in CHAPTERS:
        # No entry of a file is lost, for instance because its answer is missing.
        assert len(problems(name)) == (FOLDER / f"{name}.md").read_text().count("\n## ")
        text = chapter(name)
        assert text.count('??? success "Answer"') == len(problems(name))
        assert text.count('??? tip "Hint"') == sum(bool(problem.hint) for problem in problems(name))
        # The programs contain f-strings.
        assert name == "programs" or not re.search(r"\{\w+(:\w+)?\}", text)


@pytest.mark.spec("PROBLEMS-02")
@pytest.mark.parametrize("problem", ALL, ids=lambda problem: problem.name)
def test_text_contains_no_typed_figure(problem: Problem) -> None:
    assert typed(problem.statement) == []
    assert typed(problem.hint) == []
    assert typed(problem.answer) == []
    assert re.search(r"\d", written(problem.answer, {**problem.givens, **problem.solve(**problem.givens)}))


@pytest.mark.spec("PROBLEMS-02")
def test_typed_figures_are_found() -> None:
    assert typed("A rank stores **16 GB** in float32, {x:GB}.") == ["**16"]
    assert typed("It sends three times as much: {x}.") == ["three"]


@pytest.mark.spec("PROBLEMS-02")
@pytest.mark.parametrize("name", CHAPTERS)
def test_code_of_a_chapter_contains_only_small_numbers(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    body = [part for function in functions for node in function.body[1:] for part in ast.walk(node)]
    constants = [part.value for part in body if isinstance(part, ast.Constant)]
    numbers = [value for value in constants if isinstance(value, int | float) and not isinstance(value, bool)]
    texts = [value for value in constants if isinstance(value, str) and not re.search(r"\\d", value)]
    assert all(value in (0, 1, 2) for value in numbers), numbers
    assert [text for text in texts if re.search(r"\d", re.sub("_HYBRID_SHARD_ZERO2|fsdp1", "", text))] == []


@pytest.mark.spec("PROBLEMS-02")
def test_numbers_and_units_are_written_for_readers() -> None:
    assert [number(value) for value in (0, 7, 1120.0, 12345.6, 86.1538, 0.87499, 2.5)] == [
        *("0", "7", "1,120", "12,346", "86.15", "0.875", "2.5")
    ]
    text = written("{a:GB} {b:%} {c:ms} {d:list} {e}", {"a": 2e9, "b": 0.125, "c": 0.01, "d": (1, 2, 4), "e": "x"})
    assert text == "2 GB 12.5% 10 ms 1, 2 or 4 x"
    with pytest.raises(ValueError, match="unknown format 'miles'"):
        written("{a:miles}", {"a": 1})


# ---- givens ----


@pytest.mark.spec("PROBLEMS-03")
@pytest.mark.parametrize("problem", ALL, ids=lambda problem: problem.name)
def test_statement_uses_givens_and_no_results(problem: Problem) -> None:
    parsed = {part: _placeholders(getattr(problem, part)) for part in ("statement", "hint", "answer")}
    assert parsed["statement"]
    assert parsed["statement"] | parsed["hint"] <= set(problem.givens)
    results = set(problem.solve(**problem.givens))
    assert not results & set(problem.givens)
    # The answer uses every result.
    assert results <= parsed["answer"]


def _placeholders(template: str) -> set[str]:
    return {field for _, field, _, _ in string.Formatter().parse(template) if field}


@pytest.mark.spec("PROBLEMS-03")
def test_other_givens_change_statement_and_answer() -> None:
    problem = of("shard_of_adam")
    other = {**problem.givens, "num_ranks": 16}
    assert "on 16 ranks" in " ".join(written(problem.statement, other).split())
    assert problem.solve(**other)["held"] == 7e9 * 16 / 16
    assert answer("ring", size=64, num_ranks=4)["sent"] == 48
    assert answer("fewest_ranks", memory=160e9)["fewest"] == 7


# ---- answers, computed again ----

# Sizes of Llama 3 8B and MPT 7B from their papers.
LLAMA_BLOCK = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
LLAMA_ROOT = 2 * 128256 * 4096 + 4096
LLAMA = 32 * LLAMA_BLOCK + LLAMA_ROOT
# A block has biases and two LayerNorms; the root has tied embeddings, positions and a LayerNorm.
MPT_BLOCK = 4096 * 3 * 4096 + 3 * 4096 + 4096**2 + 4096 + 2 * 4 * 4096**2 + 4 * 4096 + 4096 + 2 * 2 * 4096
MPT_ROOT = 50368 * 4096 + 2048 * 4096 + 2 * 4096
MPT = 32 * MPT_BLOCK + MPT_ROOT


@pytest.mark.spec("PROBLEMS-04")
@pytest.mark.proof("arithmetic")
def test_answers_about_memory_equal_formulas() -> None:
    assert answer("replica")["held"] == 7e9 * (4 + 4 + 8)
    assert answer("shard_of_adam")["stored"] == 7e9 * 12 / 8
    assert answer("fewest_ranks")["fewest"] == ceil(70e9 * 16 / 80e9)
    padded = answer("padded_shard")
    assert (padded["of_flat"], padded["of_each"]) == (24 // 4, (8 * 3 + 8) // 4)
    assert answer("unsharded_in_forward")["peak"] == pytest.approx(2 * (LLAMA_ROOT + LLAMA_BLOCK), rel=1e-6)
    assert answer("one_unit")["ratio"] == pytest.approx(LLAMA / (LLAMA_ROOT + LLAMA_BLOCK), rel=1e-6)
    kept = answer("kept_for_backward")
    assert kept["more"] == pytest.approx(2 * 31 * MPT_BLOCK, rel=1e-6)
    assert kept["stored"] == pytest.approx(12 * MPT / 16, rel=1e-6)
    assert answer("unreduced_gradients")["gradients"] == pytest.approx(2 * MPT, rel=1e-6)
    assert answer("offloaded")["left"] == 0
    # Each number in bfloat16: queries, keys, values and the projection; gate, up and down; and the loss in float32.
    of_block = 4096 + 6144 + 2 * 4096 + 2 * (4096 + 14336) + 14336 + 4096
    assert answer("checkpointed")["kept"] == pytest.approx(
        8192 * (32 * 2 * of_block + 12 * 128256 + 2 * 2 * 4096), rel=0.05
    )


@pytest.mark.spec("PROBLEMS-04")
@pytest.mark.proof("arithmetic")
def test_answers_about_traffic_equal_formulas() -> None:
    assert answer("ring")["sent"] == 800e6 * 7 / 8
    assert answer("ring")["all_reduce"] == 2 * 800e6 * 7 / 8
    assert answer("against_ddp")["full"] == pytest.approx(3 * 28e9 * 63 / 64)
    assert answer("against_ddp")["ratio"] == 3 / 2
    accumulation = answer("accumulation")
    assert accumulation["without"] == pytest.approx(4 * MPT * 15 / 16, rel=1e-6)
    assert accumulation["reduced"] == pytest.approx(4 * 4 * MPT * 15 / 16, rel=1e-6)
    leaving = answer("leaving_the_machine")
    ring = 63 / 64 * (2 * 2 * 32 * LLAMA_BLOCK + 2 * LLAMA_ROOT + 4 * LLAMA)
    assert leaving["full_between"] == pytest.approx(ring / 8, rel=1e-6)
    assert leaving["hybrid_between"] == pytest.approx(2 * 4 * LLAMA / 8 * 7 / 8, rel=1e-6)
    smaller = answer("smaller_mesh")
    assert smaller["smaller"] == pytest.approx(2 * LLAMA * 63 / 64 / 8, rel=1e-6)
    assert smaller["kept"] == pytest.approx(2 * 32 * LLAMA_BLOCK / 8, rel=1e-6)
    assert "| 1 | 48 | 97 | 49 |" in answer("number_of_collectives")["table"]
    assert answer("width_of_a_reduction")["narrow"] == pytest.approx(2 * MPT * 15 / 16, rel=1e-6)
    trained = 32 * 7 * 2 * 16 * 4096
    assert answer("adapters")["reduced"] == pytest.approx(2 * trained * 7 / 8)
    assert answer("adapters")["flat"] == pytest.approx(2 * (trained + 32 * 7 * 4096**2) * 7 / 8)


@pytest.mark.spec("PROBLEMS-04")
@pytest.mark.proof("arithmetic")
def test_answers_about_strategies_equal_formulas() -> None:
    machines = answer("fewest_machines")
    parameters = machines["num_parameters"]
    assert machines["stored"] == pytest.approx(12 * parameters / machines["num_ranks"], rel=1e-6)
    assert machines["peak"] <= 80e9 < machines["more"]
    batch = answer("largest_micro_batch")
    assert batch["peak"] <= 80e9
    assert batch["other"] <= 80e9
    assert batch["kept"] < batch["again"]
    # One more sequence of MPT does not fit: its activations alone are 16 h numbers for each token and block.
    assert batch["peak"] + 32 * 2048 * 16 * 4096 * 2 > 80e9
    units = answer("blocks_in_a_unit")
    rows = re.findall(r"^\| (\d+) \| \S+ GB \| (yes|no) \| (\d+) \|", units["table"], re.MULTILINE)
    assert [int(collectives) for *_, collectives in rows] == [3 * 48 // int(blocks) + 2 for blocks, *_ in rows]
    assert units["largest"] == max(int(blocks) for blocks, fits, _ in rows if fits == "yes")
    assert {"yes", "no"} == {fits for _, fits, _ in rows}
    for name, column in (("fits_on_a_machine", "fits"), ("smaller_state", "fits")):
        found = answer(name)
        fits = re.findall(r"^\| `(.*?)` \| \S+ GB \| yes", found["table"], re.MULTILINE)
        assert found[column].replace("`", "") == " and ".join(fits)
    copies = answer("shards_of_a_copy")
    sizes = dict(re.findall(r"^\| (\d+) \| \S+ GB \| (yes|no)", copies["table"], re.MULTILINE))
    assert sizes[str(copies["best"])] == "yes"
    assert sizes[str(copies["best"] // 2)] == "no"
    fastest = answer("fastest_that_fits")
    times = re.findall(r"^\| (`\w+`) \| \S+ GB \| yes \| ([\d.]+) s", fastest["table"], re.MULTILINE)
    assert fastest["best"] == min(times, key=lambda one: float(one[1]))[0]


@pytest.mark.spec("PROBLEMS-04")
@pytest.mark.proof("arithmetic")
def test_answers_about_time_equal_formulas() -> None:
    matrices = 32 * (LLAMA_BLOCK - 2 * 4096) + 128256 * 4096
    assert answer("compute_alone")["work"] == 6 * 8192 * matrices
    assert answer("compute_alone")["seconds"] == pytest.approx(6 * 8192 * matrices / 400e12)
    ring = 63 / 64 * (2 * 2 * 32 * LLAMA_BLOCK + 2 * LLAMA_ROOT + 4 * LLAMA)
    bound = answer("compute_or_network")
    assert bound["between_seconds"] == pytest.approx(ring / 8 / 6.25e9, rel=1e-6)
    assert bound["overlapped"] == max(bound["compute"], bound["within_seconds"], bound["between_seconds"])
    hidden = answer("tokens_to_hide")
    assert hidden["fewest"] == ceil(hidden["seconds"] * 400e12 / (6 * matrices))
    # Everything in forward is computed again, except the last matrix of each block, of 4 h * h of 12 h * h elements.
    products = 32 * 12 * 4096**2
    more = 2 / 3 * products / (3 * (products + 50368 * 4096))
    assert answer("recomputation")["more"] == pytest.approx(more)


@pytest.mark.spec("PROBLEMS-04")
def test_simulated_answers_have_the_expected_effects() -> None:
    prefetch, limiter = answer("without_prefetch"), answer("without_limiter")
    assert prefetch["without"] > prefetch["before"]
    assert prefetch["memory_without"] < prefetch["memory"]
    assert limiter["without"] > limiter["held"]
    assert limiter["allocated"] <= limiter["held"]
    # The prefetched block is not there: 12 h * h elements in bfloat16, and two small norms.
    assert prefetch["memory"] - prefetch["memory_without"] == pytest.approx(2 * 12 * 4096**2, rel=0.01)
    waits = re.findall(r"GB/s \| [\d.]+ ms \| ([\d.]+) ms", answer("rate_of_the_network")["table"])
    assert [float(wait) for wait in waits] == sorted(map(float, waits), reverse=True)


# ---- programs ----

# Patterns of the outputs of both ranks, for programs whose reports depend on which rank fails first.
SAYS = {
    "early_stop": (
        r"^rank 0 stops after 1 steps\n",
        r"early_stop\.py:24: loss\.backward\(\)\n(.|\n)*#E-collective-failed",
    ),
    "rank_0_evaluates": (
        r"rank 0: all-gather of '0' in forward(.|\n)*\nrank 1: all-gather of '2' in backward(.|\n)*"
        r"#E-(waits-in-vain|collective-failed)",
        r"#E-(waits-in-vain|collective-failed)",
    ),
}


@pytest.mark.spec("PROBLEMS-05")
@pytest.mark.parametrize("name", recorded.names())
def test_program_gives_the_output_of_the_page(name: str) -> None:
    ranks = recorded.run(name)
    shown = recorded.record()[name]
    assert [bool(status) for status, _ in ranks] == [bool(status) for status in shown["status"]]
    if name not in SAYS:
        assert [text for _, text in ranks] == shown["output"]
        return
    for rank, (_, text) in enumerate(ranks):
        assert re.search(SAYS[name][rank], text)
        assert re.search(SAYS[name][rank], shown["output"][rank])


@pytest.mark.spec("PROBLEMS-05")
def test_record_belongs_to_the_current_programs() -> None:
    assert sorted(recorded.record()) == recorded.names()
    assert [problem.name for problem in problems("programs")] == [
        problem.givens["name"] for problem in problems("programs")
    ]
    assert sorted(problem.name for problem in problems("programs")) == recorded.names()
    for name, run in recorded.record().items():
        lines = recorded.source(name).splitlines()
        for found, code in re.findall(rf"^{name}\.py:(\d+): (.*)$", "\n".join(run["output"]), re.MULTILINE):
            assert lines[int(found) - 1].strip() == code
        assert str(ROOT) not in str(run)
        page = "".join(chapter("programs").split())
        assert all("".join(line.split()) in page for text in run["output"] for line in text.splitlines())
    assert sum(any(run["status"]) for run in recorded.record().values()) == 4


# ---- builds ----


@pytest.mark.spec("PROBLEMS-06")
def test_another_process_writes_the_same_chapters(tmp_path: Path) -> None:
    code = (
        "import hashlib; from docs_build.problems.chapters import CHAPTERS, chapter, contents;"
        "print(hashlib.sha256(''.join([*map(chapter, CHAPTERS), contents()]).encode()).hexdigest())"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "20260", "TZ": "Pacific/Kiritimati"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    text = "".join([*map(chapter, CHAPTERS), chapters.contents()])
    assert done.stdout.split()[-1] == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.spec("PROBLEMS-06")
@pytest.mark.needs("mkdocs")
def test_each_chapter_has_a_page_in_the_navigation() -> None:
    from docs_build.pages import directives

    navigation = (ROOT / "mkdocs.yml").read_text()
    for name, title in CHAPTERS.items():
        assert f"          - {title}: problems/{name}.md\n" in navigation
        page = (ROOT / "docs" / "problems" / f"{name}.md").read_text()
        assert f"\n# {title}\n" in page
        assert f"## {list(CHAPTERS).index(name) + 1}.1 " in directives.expand(page, f"problems/{name}.html")
        assert f"({name}.md)" in chapters.contents()
