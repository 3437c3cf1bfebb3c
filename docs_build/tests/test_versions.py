"""The page "Supported versions"."""

from pathlib import Path
from typing import Any

import pytest

from docs_build.recording import versions
from docs_build.recording.records import load
from docs_build.recording.results import WHERE

JUNIT = """<testsuites><testsuite>
<testcase classname="a" name="b"/>
<testcase classname="a" name="c"><failure message="no">text</failure></testcase>
<testcase classname="a" name="d"><error message="no">text</error></testcase>
<testcase classname="a" name="e"><skipped/></testcase>
</testsuite></testsuites>"""


def test_outcomes_of_a_run_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "run.xml"
    path.write_text(JUNIT)
    assert versions.outcomes(str(path)) == {"passed": 1, "failed": 2, "skipped": 1, "failures": ["a::c", "a::d"]}


def test_a_later_file_replaces_outcomes(tmp_path: Path) -> None:
    first, second = tmp_path / "first.xml", tmp_path / "second.xml"
    error = '<testcase classname="" name="e"><error message="import">text</error></testcase>'
    first.write_text(JUNIT.replace("</testsuite>", f"{error}</testsuite>", 1))
    second.write_text(
        '<testsuites><testsuite><testcase classname="a" name="c"/><testcase classname="e" name="x"/></testsuite>'
        "</testsuites>"
    )
    found = versions.outcomes(str(first), str(second))
    assert found == {"passed": 3, "failed": 1, "skipped": 1, "failures": ["a::d"]}


def test_a_run_replaces_the_earlier_run_of_its_version_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.xml"
    path.write_text(JUNIT)
    record: dict[str, Any] = {"2.11.0": {"cpu-gloo": {"passed": 7}}, "2.13.0": {"cpu-gloo": {"passed": 7}}}
    saved: list[Any] = []
    monkeypatch.setattr(versions, "load", lambda name: record)
    monkeypatch.setattr(versions, "save", lambda name, new: saved.append(new))
    monkeypatch.setattr(versions.metadata, "version", lambda name: "2.13.0+cpu")
    versions.main("cpu-gloo", str(path))
    assert saved[0]["2.11.0"] == {"cpu-gloo": {"passed": 7}}
    assert saved[0]["2.13.0"]["cpu-gloo"]["passed"] == 1


def test_record_has_the_oldest_and_the_newest_supported_version() -> None:
    record = load("versions")
    assert {version.rpartition(".")[0] for version in record} >= {"2.11", "2.13", "2.14", "2.15"}
    for version, backends in record.items():
        assert backends.keys() <= WHERE.keys()
        for backend, run in backends.items():
            assert run["passed"] > 100, (version, backend)
            assert len(run["failures"]) == run["failed"]
