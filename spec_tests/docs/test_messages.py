"""Every message of the package has an entry of its own on the page "Troubleshoot"."""

from __future__ import annotations

import re

import pytest

from docs_build.messages import messages
from docs_build.order import PACKAGE, ROOT


def test_addresses_are_unique_and_differ_from_those_written_by_hand() -> None:
    ids = [message.id for message in messages()]
    written = re.findall(r"\{ #(E-[a-z0-9-]+)", (ROOT / "docs" / "troubleshoot.md").read_text())
    assert len(ids + written) == len({*ids, *written})


@pytest.mark.parametrize(
    ("id", "kind", "words"),
    [
        ("E-unit-wait", "RuntimeError", "is waited for but was never gathered"),
        ("E-misuse-check-not-tied", "ValueError", "A parameter cannot be tied across units"),
        ("E-build-check-options-3", "TypeError", "sharding_strategy must be one of"),
        ("E-misuse-warn-if-stale", "UserWarning", "were replaced when the model was sharded"),
    ],
)
def test_messages_are_read_from_the_source(id: str, kind: str, words: str) -> None:
    (message,) = [one for one in messages() if one.id == id]
    assert message.kind == kind
    assert words in message.text


def test_nearly_every_raise_of_the_package_has_an_entry() -> None:
    raises = sum(
        len(re.findall(r"raise \w+(?:Error|Warning)\(\s*f?[\"']", p.read_text())) for p in PACKAGE.rglob("*.py")
    )
    assert len(messages()) >= raises
