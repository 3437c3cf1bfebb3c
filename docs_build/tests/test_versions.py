"""The page "Supported versions"."""

from pathlib import Path

from docs_build.recording import versions
from docs_build.recording.records import load
from docs_build.recording.results import WHERE

JUNIT = "<testsuites><testsuite>{}</testsuite></testsuites>"
CASE = '<testcase classname="{}" name="{}">{}</testcase>'


def test_a_later_file_replaces_outcomes(tmp_path: Path) -> None:
    first, second = tmp_path / "first.xml", tmp_path / "second.xml"
    kinds = {"b": "", "c": "<failure/>", "d": "<error/>", "e": "<skipped/>"}
    cases = [CASE.format("a", name, kind) for name, kind in kinds.items()]
    # A module that cannot be imported has no class.
    first.write_text(JUNIT.format("".join([*cases, CASE.format("", "e", "<error/>")])))
    second.write_text(JUNIT.format(CASE.format("a", "c", "") + CASE.format("e", "x", "")))
    found = versions.outcomes(str(first), str(second))
    assert found == {"passed": 3, "failed": 1, "skipped": 1, "failures": ["a::d"]}


def test_record_has_the_oldest_and_the_newest_supported_version() -> None:
    record = load("versions")
    assert {version.rpartition(".")[0] for version in record} >= {"2.11", "2.13", "2.14", "2.15"}
    for version, backends in record.items():
        for backend, run in backends.items():
            assert backend in WHERE
            assert run["passed"] > 100, (version, backend)
