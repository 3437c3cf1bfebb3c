"""The bytes that a step sends over each link: within a machine, and between two machines.

There are four ranks on two machines. A collective is a ring through its ranks and sends over the links between them::

    FULL_SHARD     0 > 1 > 2 > 3 > 0            one ring through all ranks; 1 > 2 and 3 > 0 cross the network
    HYBRID_SHARD   0 > 1 > 0 and 2 > 3 > 2      all-gathers and reduce-scatters stay inside a machine
                   0 > 2 > 0 and 1 > 3 > 1      only all-reduces of one half each cross the network

The bytes are those of the package's cost functions. `links` assigns them to links, and the sums over links are equal to
the results of `sent_by_link`. The tutorial ``hybrid.py`` counts them in a run; `draw_table` draws its output.
"""

import re
from collections import Counter
from dataclasses import dataclass

from docs_build.drawing.sketch import Panel, figure, size_of
from minifsdp_tools.cost import cost_of, sent_bytes
from minifsdp_tools.job import Job
from minifsdp_tools.links import sent_by_link

Link = tuple[int, int]
NUM_PARAMETERS, NUM_RANKS, PER_MACHINE = 10**9, 4, 2
STRATEGIES = ["FULL_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD"]
# The largest width of a link and of a bar.
THICKEST, BAR = 14, 150
SOURCE = "Computed by minifsdp_tools.links for 1 billion parameters, Adam and float32, while this page was built."

# A line of the tutorial's table: FULL_SHARD  25,056  451,008  451,008  0.24721   0>1:225,504 1>2:225,504
ROW = re.compile(r"^(\w+) +(\d+) +(\d+) +(\d+) +[\d.]+ +((?:\d+>\d+:\d+ ?)+)$", re.MULTILINE)
CAPTION = """
Bytes of the last step over each link, in both directions. Solid lines are links within a machine, and dashed lines are
network links. For each rank, plain bars show bytes within a machine, striped bars between machines.
"""


@dataclass(frozen=True)
class Sent:
    """The data of a drawing of a strategy.

    Attributes:
        strategy: its name.
        links: bytes over each link, from a rank to another.
        within, between: bytes that a rank sends within its machine, and to the other one; the mean over the ranks.
        stored: bytes that a rank stores between steps.
    """

    strategy: str
    links: Counter[Link]
    within: float
    between: float
    stored: float


def job_of(strategy: str) -> Job:
    """One unit of all parameters, on the four ranks."""
    shards = {"NO_SHARD": 1, "FULL_SHARD": NUM_RANKS}.get(strategy, PER_MACHINE)
    return Job([[(NUM_PARAMETERS,)]], strategy=strategy, num_shards=shards, num_replicas=NUM_RANKS // shards)


def links(strategy: str) -> Counter[Link]:
    """Bytes of a step over each link, from a rank to another."""
    job, found = job_of(strategy), Counter[Link]()
    for kind, num_bytes in sent_bytes(job).items():
        size, apart = (job.num_replicas, job.shards) if kind == "AR" else (job.shards, 1)
        for rank in range(NUM_RANKS):
            # The links of a ring have the length `apart`; the last one goes back to the start.
            span = size * apart
            following = rank // span * span + (rank + apart) % span
            if num_bytes and following != rank:
                found[rank, following] += int(num_bytes)
    return found


def totals(strategy: str) -> tuple[float, float]:
    """Bytes that a rank sends in a step within its machine, and to the other one; the mean over the ranks."""
    sent = sent_by_link(job_of(strategy), PER_MACHINE).values()
    return sum(one.within for one in sent), sum(one.between for one in sent)


def draw(caption: str) -> str:
    """A panel for each strategy, with computed bytes."""
    found = [Sent(one, links(one), *totals(one), cost_of(job_of(one)).stored) for one in STRATEGIES]
    return _figure(found, caption, SOURCE)


def draw_table(output: str, source: str) -> str:
    """A panel for each strategy, with the bytes that the tutorial printed."""
    return _figure(sent_in(output), " ".join(CAPTION.split()), source)


def sent_in(output: str) -> list[Sent]:
    """The lines of the tutorial's table."""
    found = []
    for row in ROW.finditer(output.replace(",", "")):
        stored, near, far = map(int, row.group(2, 3, 4))
        each = re.findall(r"(\d+)>(\d+):(\d+)", row[5])
        sent = Counter({(int(a), int(b)): int(num_bytes) for a, b, num_bytes in each})
        found.append(Sent(row[1], sent, near / NUM_RANKS, far / NUM_RANKS, stored))
    return found


def _figure(found: list[Sent], caption: str, source: str) -> str:
    """All panels in one figure, with one scale."""
    most = max(max(_both_ways(one.links).values()) for one in found)
    widest = max(max(one.within, one.between) for one in found)
    return figure("machines", [_panel(one, most, widest) for one in found], caption, source)


def _panel(sent: Sent, most: float, widest: float) -> Panel:
    lines = {link: THICKEST * num_bytes / most for link, num_bytes in _both_ways(sent.links).items()}
    within, between = size_of(sent.within), size_of(sent.between)
    bars = [
        ("within", "p", BAR * sent.within / widest, within),
        ("between", "g", BAR * sent.between / widest, between),
    ]
    text = f"For each rank and step: {within} within its machine, {between} between machines."
    text += f" Between steps a rank stores {size_of(sent.stored)}."
    return Panel(sent.strategy, {"lines": lines, "bars": bars}, 280, 210, text)


def _both_ways(found: Counter[Link]) -> Counter[Link]:
    """Sums both directions of a link, because they are drawn as one line."""
    together: Counter[Link] = Counter()
    for (a, b), num_bytes in found.items():
        together[min(a, b), max(a, b)] += num_bytes
    return together
