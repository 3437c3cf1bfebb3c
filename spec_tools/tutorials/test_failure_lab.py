"""The failure lab: each script fails as its page says, on both ranks and in time, and its corrected version does not.

The ranks are forked from a process that has already imported torch (``spec_tests/harness/programs.py``), so the
measured time is the script's own. One of the scripts is also started as a user starts it.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import tempfile
import time
from pathlib import Path

import pytest

from spec_tests.harness import pool
from spec_tests.harness.programs import outcome_of_ranks
from spec_tools.tutorials import started_by_a_user

LAB = Path(__file__).resolve().parents[2] / "tutorials" / "failure_lab"
SCRIPTS = sorted(path.stem for path in LAB.glob("*.py") if path.stem != "lab")
LIMIT = 10.0  # seconds

# The output of a rank that waited for a collective of minifsdp.
WAITED = r"Where every rank is:(.|\n)*#E-(collective-failed|waits-in-vain)"
HANGS = ("no_sync_on_one_rank", "raises_in_backward", "save_on_rank_0", "slow_rank", "uneven_batches")
# The expected output of both ranks, or of each rank.
SAYS: dict[str, str | tuple[str, str]] = {
    "branch_on_the_data": (
        r"rank 0: all-gather of 'see'.*\nrank 1: all-gather of 'read'"
        r"(.|\n)*#E-(about-to-part|waits-in-vain|collective-failed)"
    ),
    "clip_on_each_rank": r"gradients were scaled by 0\.\d+ instead of 0\.\d+",
    "expert_without_tokens": r"rank 0: reduce-scatter.*\[0, 1\].*\nrank 1: .*\[2, 3\](.|\n)*#E-order-differs",
    "frozen_with_trained": r"#E-mixed-requires-grad",
    "mean_over_tokens": r"gradient is not that of a single process",
    "method_beside_forward": r"mixed torch\.Tensor and DTensor",
    "no_sync_on_one_rank": rf"{WAITED}|#E-(order-differs|about-to-part)",
    "optimizer_too_early": r"#E-stale-optimizer(.|\n)*the loss has not fallen",
    "order_changes_later": (
        r"rank 0: all-gather of 'blocks.*\nrank 1: all-gather of 'blocks(.|\n)*#E-units-differ"
        r"(.|\n)*computed with weights of other blocks"
    ),
    "part_called_directly": r"'0\.weight'.*is sharded right now(.|\n)*#E-absent",
    "plain_checkpoint": r"#E-load-whole",
    "raises_in_backward": (
        r"rank 1: has ended, by ValueError: a gradient is not a number(.|\n)*#E-(collective-failed|waits-in-vain)",
        r"in guard\nValueError: a gradient is not a number",
    ),
    "save_on_rank_0": (r"rank\(s\) \[1\] did not call it(.|\n)*#E-missing-ranks", WAITED),
    "scaler_on_each_rank": r"one rank has made a step and the other has not",
    "seed_for_each_rank": r"4 of the 8 rows that rank 0 has drawn",
    "slow_rank": (WAITED, r"rank 0: slow_rank\.py:(.|\n)*#E-collective-failed"),
    "stale_file_on_one_rank": r'rank 1: Unexpected key\(s\) in state_dict: "head\.weight"(.|\n)*#E-state-dict-refused',
    "step_without_reduction": r"#E-unreduced-gradients",
    "still_on_meta": r"\['1\.weight', '1\.bias'\](.|\n)*#E-still-meta",
    "tied_weights": r"#E-tied-across-units",
    "uneven_batches": (
        r"rank 1: .*uneven_batches\.py:(.|\n)*#E-(collective-failed|waits-in-vain)",
        r"#E-sent-by-others(.|\n)*dist\.all_reduce",
    ),
}


@pytest.fixture(autouse=True, scope="module")
def _torch_is_imported() -> None:
    process = pool.fork_server().Process(target=int)
    process.start()
    process.join()


@functools.cache
def outcome(name: str, *arguments: str) -> tuple[list[tuple[int | None, str]], float]:
    """Exit status and output of each rank, and the duration in seconds."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        environment = {"OMP_NUM_THREADS": "1", "MINIFSDP_LEDGER_DIR": folder}
        ranks = outcome_of_ranks(LAB / f"{name}.py", *arguments, num_ranks=2, environment=environment, limit=2 * LIMIT)
    return ranks, time.monotonic() - begin


@pytest.mark.pure
@pytest.mark.spec("LAB-01")
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_has_a_question_one_error_and_a_fix(name: str) -> None:
    text = (LAB / f"{name}.py").read_text()
    tree = ast.parse(text)
    assert 25 <= len(text.splitlines()) <= 60
    assert "?" in ast.get_docstring(tree)
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert functions >= {"broken", "experiment", "fixed"}


@pytest.mark.spec("LAB-02")
@pytest.mark.parametrize("name", SCRIPTS)
def test_failing_script_ends_in_time_and_each_rank_prints_the_cause(name: str) -> None:
    ranks, seconds = outcome(name)
    says = SAYS[name]
    for rank, (status, words) in enumerate(ranks):
        assert status == 1, words
        assert re.search(says if isinstance(says, str) else says[rank], words), words
        assert words.count(f"rank {rank} says:\n  {name}.py:") == 1, words
    assert seconds < LIMIT


@pytest.mark.spec("LAB-03")
@pytest.mark.parametrize("name", SCRIPTS)
def test_fixed_script_succeeds_on_both_ranks(name: str) -> None:
    ranks, seconds = outcome(name, "--fixed")
    for rank, (status, words) in enumerate(ranks):
        assert status == 0, words
        assert words.rstrip().endswith(f"rank {rank} has ended well"), words
        assert "Warning" not in words
    assert seconds < LIMIT


@pytest.mark.spec("LAB-04", "LEDGER-02")
@pytest.mark.parametrize("name", HANGS)
def test_waiting_rank_prints_its_own_and_other_position(name: str) -> None:
    ranks, seconds = outcome(name)
    # A new order is compared before any data is sent.
    assert seconds > 1.5 or name == "no_sync_on_one_rank"
    for rank, (_, words) in enumerate(ranks):
        if (name, rank) != ("raises_in_backward", 1):
            assert "Where every rank is:" in words
            assert re.search(rf"^(\[rank\d\]: )?ranks? .*{1 - rank}: ", words, re.MULTILINE), words
            assert re.search(
                rf"^  {name}\.py:\d+: .*(model\(|save\(|backward\(|all_reduce\().*, in \w+$", words, re.MULTILINE
            )


@pytest.mark.spec("LAB-05")
def test_script_without_launcher_prints_both_ranks_one_after_the_other() -> None:
    done = started_by_a_user(sys.executable, str(LAB / "raises_in_backward.py"))
    assert done.returncode == 1
    # Rank 1 fails seconds before rank 0. Without waiting, only its output would be shown.
    first, second = done.stdout.index("rank 0 says:"), done.stdout.index("rank 1 says:")
    assert "rank 1: has ended, by ValueError: a gradient is not a number" in done.stdout[first:second]
    assert done.stdout[second:].rstrip().endswith("ValueError: a gradient is not a number")
