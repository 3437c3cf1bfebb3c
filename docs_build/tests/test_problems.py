"""The problems: their texts contain no typed figures, and formulas written here give the same answers."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from math import ceil
from typing import Any

import pytest
from jinja2 import meta

from docs_build.problems import recorded
from docs_build.problems.chapters import CHAPTERS, Problem, chapter, contents, problems
from docs_build.problems.writing import TEMPLATES, written
from docs_build.reading.order import ROOT

FOLDER = ROOT / "docs_build" / "problems"
# A figure in digits or as a word, and names that contain a digit.
FIGURE = re.compile(
    r"\S*\d\S*|\b(?:three|four|five|six|seven|eight|nine|ten|twelve|twice|half|doubled?|thirds?|quarters?|dozens?"
    r"|hundreds?|thousands?|millions?|billions?)\b",
    re.IGNORECASE,
)
NAMES = re.compile(r"\b(?:float32|float16|bfloat16|FSDP[12]|ZeRO-[123]|[Rr]ank 0|[Ee]xercise \d+)\b")
ALL = [problem for name in CHAPTERS for problem in problems(name)]


def answer(name: str, **givens: Any) -> dict[str, Any]:
    """The figures of an answer, with other givens if there are any."""
    problem = next(problem for problem in ALL if problem.name == name)
    return {**problem.givens, **problem.solve(**givens)}


def fields(template: str) -> set[str]:
    return meta.find_undeclared_variables(TEMPLATES.parse(template))


# ---- the texts ----


@pytest.mark.spec("PROBLEMS-01", "PROBLEMS-06")
def test_chapters_are_pages_with_about_forty_problems_and_folded_answers() -> None:
    assert len(CHAPTERS) == 5
    assert 38 <= len({problem.name for problem in ALL}) == len(ALL) <= 46
    assert sum(bool(problem.hint) for problem in ALL) >= 10
    navigation = (ROOT / "mkdocs.yml").read_text()
    for name, title in CHAPTERS.items():
        assert f"          - {title}: problems/{name}.md\n" in navigation
        assert f"({name}.md)" in contents()
        # No entry of a file is lost, for instance because its answer is missing.
        assert len(problems(name)) == (FOLDER / f"{name}.md").read_text().count("\n## ") >= 7
        assert chapter(name).count('??? success "Answer"') == len(problems(name))


@pytest.mark.spec("PROBLEMS-06")
def test_another_process_gives_the_same_chapters() -> None:
    code = "from docs_build.problems.chapters import *; print(contents(), *map(chapter, CHAPTERS))"
    # Another order of sets of strings, a time zone far from UTC, and another language.
    environment = {**os.environ, "PYTHONHASHSEED": "20260", "TZ": "Pacific/Kiritimati", "LANG": "C"}
    done = subprocess.run([sys.executable, "-X", "utf8", "-c", code], cwd=ROOT, env=environment, capture_output=True)
    assert done.stdout.decode() == " ".join([contents(), *map(chapter, CHAPTERS)]) + "\n"


@pytest.mark.spec("PROBLEMS-02", "PROBLEMS-03")
@pytest.mark.parametrize("problem", ALL, ids=lambda problem: problem.name)
def test_every_figure_of_a_text_is_given_or_computed(problem: Problem) -> None:
    for template in (problem.statement, problem.hint, problem.answer):
        assert FIGURE.findall(NAMES.sub("", re.sub(r"\{.*?\}", "", template))) == []
        expressions = " ".join(re.findall(r"\{.*?\}", template))
        assert set(re.findall(r"(?<!\w)\d[\w.]*", expressions)) <= {"0", "1"}
    results = set(problem.solve())
    assert fields(problem.statement)
    assert fields(problem.statement) | fields(problem.hint) <= set(problem.givens)
    # The answer uses every result.
    assert results <= fields(problem.answer) - set(problem.givens)


@pytest.mark.spec("PROBLEMS-02")
@pytest.mark.parametrize("name", CHAPTERS)
def test_code_of_a_chapter_contains_only_small_numbers(name: str) -> None:
    functions = [
        node for node in ast.parse((FOLDER / f"{name}.py").read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    body = [part for function in functions for node in function.body[1:] for part in ast.walk(node)]
    constants = [part.value for part in body if isinstance(part, ast.Constant)]
    assert {value for value in constants if type(value) in (int, float)} <= {0, 1, 2}
    texts = [value for value in constants if isinstance(value, str) and r"\d" not in value]
    assert [text for text in texts if re.search(r"\d", re.sub("_HYBRID_SHARD_ZERO2|fsdp1", "", text))] == []


@pytest.mark.spec("PROBLEMS-03")
def test_other_givens_change_statement_and_answer() -> None:
    assert answer("ring", size=64, num_ranks=4)["sent"] == 48
    assert answer("fewest_ranks", memory=160e9)["fewest"] == 7
    problem = next(problem for problem in ALL if problem.name == "shard_of_adam")
    other = {**problem.givens, "num_ranks": 16}
    assert "on 16 ranks" in " ".join(written(problem.statement, other).split())
    assert problem.solve(num_ranks=16)["cost"].after_backward == 7e9


# ---- answers, computed again ----

# Sizes of Llama 3 8B and MPT 7B from their papers.
LLAMA_BLOCK = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
LLAMA_ROOT = 2 * 128256 * 4096 + 4096
LLAMA = 32 * LLAMA_BLOCK + LLAMA_ROOT
# A block has biases and two LayerNorms; the root has tied embeddings, positions and a LayerNorm.
MPT_BLOCK = 4096 * 3 * 4096 + 3 * 4096 + 4096**2 + 4096 + 2 * 4 * 4096**2 + 4 * 4096 + 4096 + 2 * 2 * 4096
MPT_ROOT = 50368 * 4096 + 2048 * 4096 + 2 * 4096
MPT = 32 * MPT_BLOCK + MPT_ROOT
# Bytes that a rank of 64 sends in a step: two all-gathers in bfloat16, of the root one, and a reduction in float32.
RING = 63 / 64 * (2 * 2 * 32 * LLAMA_BLOCK + 2 * LLAMA_ROOT + 4 * LLAMA)
TRAINED = 32 * 7 * 2 * 16 * 4096
MATRICES = 32 * (LLAMA_BLOCK - 2 * 4096) + 128256 * 4096
PRODUCTS = 32 * 12 * 4096**2
# Each number in bfloat16: queries, keys, values and the projection; gate, up and down; and the loss in float32.
KEPT_OF_BLOCK = 4096 + 6144 + 2 * 4096 + 2 * (4096 + 14336) + 14336 + 4096
FORMULAS = {
    ("replica", "held"): 7e9 * (4 + 4 + 8),
    ("shard_of_adam", "cost.stored"): 7e9 * 12 / 8,
    ("fewest_ranks", "fewest"): ceil(70e9 * 16 / 80e9),
    ("padded_shard", "flat // num_ranks"): 24 // 4,
    ("padded_shard", "each // num_ranks"): (8 * 3 + 8) // 4,
    ("unsharded_in_forward", "cost.peak_forward - cost.stored"): 2 * (LLAMA_ROOT + LLAMA_BLOCK),
    ("one_unit", "one / blocks"): LLAMA / (LLAMA_ROOT + LLAMA_BLOCK),
    ("kept_for_backward", "kept.peak_forward - full.peak_forward"): 2 * 31 * MPT_BLOCK,
    ("kept_for_backward", "full.stored"): 12 * MPT / 16,
    ("unreduced_gradients", "job.gradients|sum"): 2 * MPT,
    ("offloaded", "host.stored"): 0,
    ("ring", "sent"): 800e6 * 7 / 8,
    ("ring", "all_reduce"): 2 * 800e6 * 7 / 8,
    ("against_ddp", "full"): 3 * 28e9 * 63 / 64,
    ("against_ddp", "full / ddp"): 3 / 2,
    ("accumulation", "unreduced.RS"): 4 * MPT * 15 / 16,
    ("accumulation", "reduced.RS"): 4 * 4 * MPT * 15 / 16,
    ("leaving_the_machine", "full.between"): RING / 8,
    ("leaving_the_machine", "hybrid.between"): 2 * 4 * LLAMA / 8 * 7 / 8,
    ("smaller_mesh", "smaller"): 2 * LLAMA * 63 / 64 / 8,
    ("smaller_mesh", "kept"): 2 * 32 * LLAMA_BLOCK / 8,
    ("width_of_a_reduction", "sent_narrow.RS"): 2 * MPT * 15 / 16,
    ("adapters", "sent.RS"): 2 * TRAINED * 7 / 8,
    ("adapters", "flat.RS"): 2 * (TRAINED + 32 * 7 * 4096**2) * 7 / 8,
    ("compute_alone", "work"): 6 * 8192 * MATRICES,
    ("compute_alone", "work / rate"): 6 * 8192 * MATRICES / 400e12,
    ("compute_or_network", "links['the links between machines']"): RING / 8 / 6.25e9,
    # Everything in forward is computed again, except the last matrix of each block, of 4 h * h of 12 h * h elements.
    ("recomputation", "again / kept - 1"): 2 / 3 * PRODUCTS / (3 * (PRODUCTS + 50368 * 4096)),
}


@pytest.mark.spec("PROBLEMS-04")
@pytest.mark.proof("arithmetic")
@pytest.mark.parametrize(("name", "figure"), FORMULAS)
def test_answer_equals_its_formula(name: str, figure: str) -> None:
    found = TEMPLATES.compile_expression(figure)(**answer(name))
    assert found == pytest.approx(FORMULAS[name, figure], rel=1e-6)


def chosen(name: str, fits: str) -> list[tuple[str, ...]]:
    """The groups of a pattern in the rows of an answer's table."""
    return re.findall(fits, answer(name)["table"], re.MULTILINE)


@pytest.mark.spec("PROBLEMS-04")
@pytest.mark.proof("arithmetic")
def test_chosen_numbers_are_the_best_that_fit() -> None:
    kept = 8192 * (32 * 2 * KEPT_OF_BLOCK + 12 * 128256 + 2 * 2 * 4096)
    assert answer("checkpointed")["kept"] == pytest.approx(kept, rel=0.05)
    assert "| 1 | 48 | 97 | 49 |" in answer("number_of_collectives")["table"]
    machines, batch = answer("fewest_machines"), answer("largest_micro_batch")
    assert machines["peak"](machines["fewest"]) <= 80e9 < machines["peak"](machines["fewest"] - 1)
    # One more sequence of MPT does not fit: its activations alone are 16 h numbers for each token and block.
    peak = batch["peak"](batch["kept"], False)
    assert peak <= 80e9 < peak + 32 * 2048 * 16 * 4096 * 2
    units = chosen("blocks_in_a_unit", r"^\| (\d+) \| \S+ GB \| (yes|no) \| (\d+) \|")
    assert [int(collectives) for *_, collectives in units] == [3 * 48 // int(blocks) + 2 for blocks, *_ in units]
    assert answer("blocks_in_a_unit")["largest"] == max(int(blocks) for blocks, fits, _ in units if fits == "yes")
    for name in ("fits_on_a_machine", "smaller_state"):
        fits = chosen(name, r"^\| `(.*?)` \| \S+ GB \| yes")
        assert answer(name)["fits"].replace("`", "") == " and ".join(fits)
    best = answer("shards_of_a_copy")["best"]
    sizes = dict(chosen("shards_of_a_copy", r"^\| (\d+) \| \S+ GB \| (yes|no)"))
    assert (sizes[str(best)], sizes[str(best // 2)]) == ("yes", "no")
    times = chosen("fastest_that_fits", r"^\| (`\w+`) \| \S+ GB \| yes \| ([\d.]+) s")
    assert answer("fastest_that_fits")["best"] == min(times, key=lambda one: float(one[1]))[0]
    hidden, bound = answer("tokens_to_hide"), answer("compute_or_network")
    assert hidden["fewest"] == ceil(hidden["seconds"] * 400e12 / (6 * MATRICES))
    assert bound["time"].overlapped == max(bound["time"].compute, *bound["links"].values())


@pytest.mark.spec("PROBLEMS-04")
def test_simulated_answers_have_the_expected_effects() -> None:
    prefetch, limiter = answer("without_prefetch"), answer("without_limiter")
    assert prefetch["without"].seconds > prefetch["before"].seconds
    # The prefetched block is not there: 12 h * h elements in bfloat16, and two small norms.
    smaller = prefetch["before"].peak_held - prefetch["without"].peak_held
    assert smaller == pytest.approx(2 * 12 * 4096**2, rel=0.01)
    assert limiter["without"].peak_held > limiter["before"].peak_held >= limiter["without"].peak_allocated
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
    page = "".join(chapter("programs").split())
    assert all("".join(line.split()) in page for text in shown["output"] for line in text.splitlines())
    assert [bool(status) for status, _ in ranks] == [bool(status) for status in shown["status"]]
    if name not in SAYS:
        assert [text for _, text in ranks] == shown["output"]
        return
    for rank, (_, text) in enumerate(ranks):
        assert re.search(SAYS[name][rank], text)
        assert re.search(SAYS[name][rank], shown["output"][rank])


@pytest.mark.spec("PROBLEMS-05")
def test_each_program_is_a_problem_with_a_record() -> None:
    assert sorted(recorded.record()) == sorted(one.name for one in problems("programs")) == recorded.names()
