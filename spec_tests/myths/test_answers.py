"""The page of myths: each answer names the requirements whose tests prove it, or has a test of its own."""

from __future__ import annotations

import re

import pytest

from spec_tests.harness import accounting

TEXTS = [path.read_text(encoding="utf-8") for path in accounting.test_files()]
SPEC = (accounting.ROOT / "docs" / "spec.md").read_text(encoding="utf-8")
MYTHS = dict(re.findall(r"^\| (MYTH-\d+) \| (.*)", SPEC, re.MULTILINE))


def is_tested(row: str) -> bool:
    return any(f'"{row}"' in text for text in TEXTS)


@pytest.mark.proof("text")
@pytest.mark.parametrize("myth", [pytest.param(myth, marks=pytest.mark.spec(myth)) for myth in MYTHS])
def test_answer_has_a_test_or_names_requirements_that_have_one(myth: str) -> None:
    named = set(re.findall(r"\b(?:[A-Z0-9]+-)+\d\d\b", MYTHS[myth])) & accounting.read_rows().keys()
    assert is_tested(myth) or any(map(is_tested, named))
