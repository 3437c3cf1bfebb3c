"""``python -m pytest --about "no_sync, fully_shard, precision"``: the tests that are about all of these topics.

A topic is a key of `TOPICS`, or any other word. A test is about a topic if one of the topic's words occurs in the test:
in its path and name, its own lines, the values of its parameters, or the statements of its requirements in
``docs/spec.md``. A variant of a test of both APIs is only about its own API.
``--collect-only -q`` only lists the tests.

Files in which a topic does not occur are not imported, so the list takes seconds.
"""

from __future__ import annotations

import functools
import inspect
import pathlib
import re

import pytest

from spec_tests.harness.accounting import ROOT, read_rows, rows_proven_by

ID = re.compile(r"(?:[A-Z0-9]+-)+\d+")

TOPICS = {
    "fully_shard": "fully_shard|FSDPModule",
    "wrapper": r"\bFSDP\(|FullyShardedDataParallel|\bwrapper\b",
    "no_sync": "no_sync|NOSYNC|gradient_sync|is_last_backward|accumulat",
    "precision": "precision|bfloat16|float16|param_dtype|reduce_dtype",
    "prefetch": "prefetch",
    "order": r"\border\b|\bsequence\b",
    "limiter": "limit_all_gathers|limiter|throttle",
    "memory": "memory|LiveBytes|peak|storage",
    "streams": "stream",
    "clipping": "clip_grad",
    "offload": "offload",
    "hybrid": "hybrid|HSDP|replicate",
    "mesh": "mesh",
    "reshard": "reshard",
    "state dict": "state_dict|state dict",
    "optimizer state": "optim_state|optimizer state|OptimStateDict",
    "checkpoint": "checkpoint",
    "summon": "summon",
    "compile": r"torch\.compile|\bcompiled?\b",
    "meta device": "meta",
    "wrapping": "wrap_policy|auto_wrap|wrapping",
    "ignored": "ignored",
    "frozen": "frozen|requires_grad",
    "shared": r"shared|\btied?\b",
    "hooks": "hook",
    "errors": r"raises|refused",
    "exceptions": "exception",
    "warnings": "warn",
}
"""For each topic, the pattern of its words; upper and lower case are the same."""

# The names of the two APIs in parameters of tests.
API_VALUES = {"fully_shard": {"fully_shard"}, "wrapper": {"wrapper", "wrapped", "originals", "flat", "original"}}


def pattern_of(topic: str) -> re.Pattern[str]:
    """The pattern of a topic, or of a word that is no topic."""
    return re.compile(TOPICS.get(topic, re.escape(topic)), re.IGNORECASE)


def topics_of(config: pytest.Config) -> list[str]:
    """The topics that the command names."""
    return [topic.strip() for topic in (config.getoption("--about") or "").split(",") if topic.strip()]


def statements_in(text: str) -> str:
    """The statements of the requirements that a text names."""
    rows = _rows()
    return "\n".join(rows.get(row, "") for row in set(ID.findall(text)))


def leaves_out_file(config: pytest.Config, path: pathlib.Path) -> bool:
    """Whether no test of a file can be about all topics."""
    topics = topics_of(config)
    if not topics or path.suffix != ".py":
        return False
    source = path.read_text(encoding="utf-8")
    # The values of the parameter `api` are in another file.
    apis = "fully_shard wrapper" if re.search(r"\bapis?\b", source, re.IGNORECASE) else ""
    text = "\n".join([str(path.relative_to(ROOT)), source, statements_in(source), apis])
    return not all(pattern_of(topic).search(text) for topic in topics)


def is_about(item: pytest.Item, topic: str) -> bool:
    """Whether a word of the topic occurs in the test. A variant for one API is only about this API."""
    values = {str(value) for value in getattr(getattr(item, "callspec", None), "params", {}).values()}
    if topic in API_VALUES and values & set().union(*API_VALUES.values()):
        return bool(values & API_VALUES[topic])
    own = inspect.getsource(item.function)  # type: ignore[attr-defined]
    rows = rows_proven_by(item)
    text = "\n".join([item.nodeid, own, *values, *rows, statements_in(" ".join(rows))])
    return pattern_of(topic).search(text) is not None


def choose_topics(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests that are not about all topics of ``--about``."""
    topics = topics_of(config)
    if not topics:
        return
    chosen = [item for item in items if all(is_about(item, topic) for topic in topics)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


@functools.cache
def _rows() -> dict[str, str]:
    return read_rows()
