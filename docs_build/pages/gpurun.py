"""Tables about the run on a GPU, from ``docs/data/gpu.json``.

The record was made from the reports and logs of three runs of the kit (``spec_tools/gpu``) on one GPU.
"""

from docs_build.reading.text import table
from docs_build.recording.records import load

STEPS = ("ms", "host ms", "tokens/s", "TFLOP/s", "peak GiB", "syncs", "mallocs")


def machine() -> str:
    """The date, the GPU and the versions, as one line."""
    record = load("gpu")
    hardware = record["hardware"]
    versions = ", ".join(f"{name} {version}" for name, version in hardware["versions"].items())
    return f"{record['date']}, one {hardware['devices'][0]['name']}, {versions}"


def num_passed() -> int:
    """The number of tests that passed on the GPU."""
    return sum(file["passed"] for file in load("gpu")["tests"].values())


def steps() -> str:
    """Times and memory of training steps, as Markdown."""
    rows = [(f"{line['size']}", line["contender"], *(line[name] for name in STEPS)) for line in load("gpu")["steps"]]
    return table(["model", "trainer", *STEPS], rows, "llr")


def races() -> str:
    """The configurations of the race hunt, as Markdown."""
    by_name: dict[str, list[dict[str, object]]] = {}
    for line in load("gpu")["races"]:
        if line["seed"] >= 0:
            by_name.setdefault(line["configuration"], []).append(line)
    rows = [
        (
            name,
            len(lines),
            sum(int(str(line["delays"])) for line in lines),
            sum(line["outcome"] != "passed" for line in lines),
        )
        for name, lines in by_name.items()
    ]
    return table(["configuration, 2 ranks", "seeds", "delays", "different"], rows, "lr")


def tests() -> str:
    """The test files that ran, as Markdown."""
    rows = [
        (f"`{name}`", file["passed"], file["failed"] or "", "yes" if file["complete"] else "in part")
        for name, file in sorted(load("gpu")["tests"].items())
    ]
    return table(["file", "passed", "failed", "complete"], rows, "lrrl")
