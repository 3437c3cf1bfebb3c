"""The report as Markdown: the summary, and a section for each stage that has run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spec_tools.gpu import bandwidth_table, control, steps_table
from spec_tools.gpu.advice import as_lines
from spec_tools.gpu.stages import STAGES
from spec_tools.gpu.summary import summary

__all__ = ["markdown"]

WORDS = ("passed", "failed", "crashed", "hung", "stopped")


def markdown(report: Mapping[str, Any], json_name: str) -> Iterator[str]:
    """The lines of the report; ``json_name`` is the name of the JSON file."""
    yield f"# minifsdp {report['minifsdp']} on {report['device']}, {report['date']}"
    if report["caution"]:
        yield f"\n**{report['caution']}**"
    yield from ("", *summary(report))
    yield from ("", "## Hardware", "", *_hardware(report["hardware"]))
    yield from ("", "## Stages", "", *_stages(report))
    if report["links"]:
        yield from ("", "## Links", "", *_links(report["links"]))
    if report["control"]:
        yield from ("", "## Control", "", *_control(report["control"]))
    if report["bandwidth"]:
        yield from ("", "## Bandwidth", "", *bandwidth_table.table(report["bandwidth"]))
    if report["steps"]:
        yield from ("", "## Training steps", "", *steps_table.table(report["steps"]))
    yield from _suite(report)
    if report["benchmarks"]:
        yield from ("", "## Benchmarks", "", *_benchmarks(report))
    if report["races"]:
        yield from ("", "## Race hunt", "", *_races(report))
    yield from _failures(report)
    yield f"\nAll of it, for programs: `{json_name}`, beside this file."


def _hardware(hardware: Mapping[str, Any]) -> Iterator[str]:
    if not hardware:
        yield "* the hardware was not inspected"
        return
    yield "* " + ", ".join(f"{name} {version}" for name, version in hardware["versions"].items())
    yield f"* {hardware['system']}, {hardware['processors']} processors"
    for index, device in enumerate(hardware["devices"]):
        more = ", ".join(f"{name} {value}" for name, value in device.items() if name != "name")
        yield f"* device {index}: {device['name']}{', ' + more if more else ''}"
    # The first line has the versions.
    if lines := hardware.get("lines", [])[1:]:
        yield from ("", *("    " + part for line in lines for part in line.splitlines()))


def _links(findings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from ("| pair of ranks | wrong values | ms | GB/s | |", "|---|---|---|---|---|")
    for line in findings:
        cells = [line.get(name, "") for name in ("pair", "wrong", "ms", "GB/s")]
        note = line.get("warning") or ("" if line.get("outcome") == "passed" else line.get("text", ""))
        yield f"| {' | '.join(_cell(str(cell)) for cell in [*cells, note])} |"


def _stages(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"| stage | {' | '.join(WORDS)} | minutes |"
    yield "|---" * (2 + len(WORDS)) + "|"
    for stage in STAGES:
        chunks = [chunk for name, chunk in report["chunks"].items() if name.split("/")[0] == stage.name]
        words = [chunk["word"] for chunk in chunks]
        if not words:
            yield f"| {stage.name} | not run |" + " |" * len(WORDS)
            continue
        counts = " | ".join(str(words.count(word)) for word in WORDS)
        yield f"| {stage.name} | {counts} | {sum(chunk['seconds'] for chunk in chunks) / 60:.1f} |"


def _control(findings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "Failed stages ran again in a new process, and then with torch's own FSDP. The verdicts:"
    yield from ("", *(f"* {word}: {number}" for word, number in control.counts(findings).items()), "")
    yield from ("| failed | again | with torch | verdict | torch's error |", "|---|---|---|---|---|")
    for line in findings:
        cells = [line["what"], line["alone"], line["torch"], line["verdict"], line["torch's error"]]
        yield f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(text: str) -> str:
    """One line without the character that separates cells."""
    return " ".join(text.split()).replace("|", "\\|")[:160]


def _suite(report: Mapping[str, Any]) -> Iterator[str]:
    counts, rows = report["tests"], report["rows"]
    if any(counts.values()):
        yield from ("", "## Suite", "")
        yield f"{', '.join(f'{number} {word}' for word, number in counts.items())}."
        yield f"\nRows of the spec: {len(rows['proven'])} proven, {len(rows['failed'])} failed."
        for word in ("failed", "proven"):
            yield f"\n{word.capitalize()}: {', '.join(rows[word]) or 'none'}"


def _benchmarks(report: Mapping[str, Any]) -> Iterator[str]:
    yield "Measured on the CPUs of this machine, with gloo: the benchmarks know no other device.\n"
    yield "Time of a step, divided by that of the faster FSDP of torch in the same round: median and quartiles."
    yield from ("", "| workload | trainer | ratio | the faster of torch |", "|---|---|---|---|")
    for line in report["benchmarks"]:
        ratio = line["ratio_to_best_torch"]
        quartiles = f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
        yield f"| {line['workload']} | {line['contender']} | {quartiles} | {line['best_torch']} |"


def _races(report: Mapping[str, Any]) -> Iterator[str]:
    yield "Bit by bit against a reference in which the device is synchronised after every operator."
    yield from ("", "| configuration | ranks | seeds | delays | different |", "|---|---|---|---|---|")
    by_chunk: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for finding in report["races"]:
        by_chunk.setdefault((finding["configuration"], finding["ranks"]), []).append(finding)
    for (configuration, ranks), findings in by_chunk.items():
        seeds = [finding for finding in findings if finding.get("seed", -1) >= 0]
        different = [finding["text"] for finding in findings if finding["outcome"] == "failed"]
        delays = sum(finding["delays"] for finding in seeds)
        first = different[0].splitlines()[0] if different else "none"
        yield f"| {configuration} | {ranks} | {len(seeds)} | {delays} | {first} |"


def _failures(report: Mapping[str, Any]) -> Iterator[str]:
    failures = {
        name: chunk
        for name, chunk in report["chunks"].items()
        # The section "Control" has the results of its chunks, and a stopped chunk runs again.
        if chunk["word"] not in ("passed", "stopped") and not name.startswith("control/")
    }
    if failures:
        yield "\n## What went wrong"
    for name, chunk in failures.items():
        yield from (f"\n### {name}: {chunk['word']}", "", f"{chunk['reason']}", "")
        if chunk.get("advice"):
            yield from ("    " + line for line in as_lines(chunk["advice"], chunk.get("files", ())))
            yield ""
        yield from ("    " + line for line in chunk["last_lines"].splitlines())
