"""``python -m minifsdp``."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from string import Formatter

import pytest

import minifsdp
from minifsdp.debugging.explain_error import TOOLS, explanation, main
from minifsdp.engine.messages import message, texts
from spec_tests.harness.accounting import ROOT

PARSE = Formatter().parse


@pytest.mark.spec("START-05")
def test_command_at_the_end_of_a_message_explains_the_message() -> None:
    last = message("tied-across-units", path="a.weight", other="b.weight").splitlines()[-1]
    command = last.partition("or run: ")[2].split()
    assert command[:3] == ["python", "-m", "minifsdp"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, *command[1:]], env=environment, capture_output=True, encoding="utf-8", check=True
    )
    text = " ".join(done.stdout.split())
    assert text.startswith("E-tied-across-units parameter … is the same as … of a unit")
    assert "leave both in the root unit." in text


@pytest.mark.spec("START-05")
def test_every_message_has_an_explanation() -> None:
    for name, message_text in texts()["message"].items():
        text = explanation(f"E-{name}")
        assert text == explanation(name) == explanation(f"troubleshoot.html#E-{name}")
        fixed = " ".join("".join(words + "…" * (field is not None) for words, field, *_ in PARSE(message_text)).split())
        assert f"E-{name} {fixed}" in " ".join(text.split())


@pytest.mark.spec("START-05")
def test_an_unknown_entry_names_similar_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain-error", "E-tied-accross-unit"]) == 2
    assert "E-tied-across-units" in capsys.readouterr().out
    assert main(["explain-error"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"E-{name}" for name in sorted(texts()["message"])]


@pytest.mark.spec("START-06")
def test_the_tools_in_the_list_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.strip() == TOOLS.strip()
    in_programs = re.findall(r"\bminifsdp(?:_tools)?\.\w+(?=[, ] )", TOOLS)
    modules = {*re.findall(r"python -m ([\w.]+)", TOOLS), *in_programs}
    assert len(modules) >= 7
    for name in modules:
        assert importlib.util.find_spec(name), name
    for name in re.findall(r"minifsdp\.(\w+)\(", TOOLS):
        assert callable(getattr(minifsdp, name)), name
    for path in re.findall(r"\S+\.py", TOOLS):
        assert (ROOT / path).is_file()
