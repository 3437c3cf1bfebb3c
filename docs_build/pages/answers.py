"""The values in the answers to the exercises. Each function has the name of an exercise in ``exercises.md``."""

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import torch

from docs_build.drawing.pictures import events_of
from docs_build.pages.values import zero_gigabytes
from docs_build.reading.papers import hybrid_cross_host, hybrid_cross_host_as_printed
from docs_build.recording.recordings import find
from minifsdp.engine.collectives import Scaling
from minifsdp.engine.extension_points import ExtensionPoints
from minifsdp.engine.flat_tensor import FlatSharding
from minifsdp.engine.layout import Layout
from minifsdp.engine.lifetime import RateLimiter
from minifsdp.engine.shards import padded_shard_numel, shard_shape
from minifsdp.engine.unit import Unit, UnitPolicy
from minifsdp_tools.events import peak_gathered_bytes

Values = dict[str, Any]
# Recorded steps of wide models, and of the step player's model.
STEP, PLAYED = "fsdp1-{}-block-2-wide", "{}-full-pre-block-2"


def zero_stage_3() -> Values:
    return {"whole": 16 * 7.5, "stages": zero_gigabytes(7.5, 64)}


def sum_of_two() -> Values:
    gradients = torch.tensor([[1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 0, 1], [9, 7, 5, 3, 1, 0]])
    pieces = gradients.sum(0).chunk(3)
    given = ", ".join(f"`{piece.tolist()}` to rank {rank}" for rank, piece in enumerate(pieces))
    return {"given": given, "whole": torch.cat(pieces).tolist()}


def one_unit() -> Values:
    runs = {"blocks": STEP.format("full-pre"), "whole": "fsdp1-full-pre-whole-2-wide"}
    sizes = [unit["bytes"] for unit in find(runs["blocks"])["units"]]
    peaks = {name: peak_gathered_bytes(events_of(run)[0]) for name, run in runs.items()}
    return {**peaks, "block": max(sizes), "root": min(sizes)}


def five_rows() -> Values:
    shape = torch.Size((5, 8))
    rows, sent = [shard_shape(shape, 0, 4, rank)[0] for rank in range(4)], padded_shard_numel(shape, 0, 4)
    return {"first": rows[0], "rows": ", ".join(map(str, rows)), "sent": sent, "padded": 4 * sent}


def padding() -> Values:
    flat = FlatSharding((3, 4, 6), 4)
    piece, part = flat.shard_range(2), flat.range_in_param(2, 2)
    return {"flat": flat, "piece": (piece.start, piece.stop - 1), "part": (part.start, part.stop - 1)}


def root_padding() -> Values:
    return _of_unit("", "bytes")


def two_types() -> Values:
    return _of_unit("stage0.block0", "shard")


def _of_unit(name: str, what: str) -> Values:
    """A size of a unit of the step player's model, in both layouts."""
    return {
        layout: next(unit[what] for unit in find(PLAYED.format(api))["units"] if unit["name"] == name)
        for layout, api in (("flat", "fsdp1"), ("each", "fsdp2"))
    }


def who_is_whole() -> Values:
    seen: list[str] = []
    # The layout only records the calls that it receives.
    layout, nothing = MagicMock(spec=Layout), cast(Any, None)
    layout.all_gather.return_value.wait.side_effect = lambda: seen.append("wait for the all-gather")
    layout.free.side_effect = lambda: seen.append("free the memory")
    unit = Unit([torch.nn.Identity()], layout, [nothing], UnitPolicy(reshard_after_forward=True))
    root: Any = SimpleNamespace(
        comm_streams=None, limiter=RateLimiter(enabled=False), iteration=SimpleNamespace(points=ExtensionPoints())
    )
    unit.root = root
    for verb in (unit.unshard, unit.reshard):
        verb()
        seen.append(unit.state.name)
    return {"first": seen[0], "last": seen[-1], "steps": ", ".join(seen[1:-1])}


def first_gather_of_backward() -> Values:
    gathers = [event.unit for event in events_of(STEP.format("full-off"))[0] if event.kind == "AG"]
    return {"counts": ", ".join(f"{unit or 'root'}: {gathers.count(unit)}" for unit in dict.fromkeys(gathers))}


def two_by_two() -> Values:
    whole = [torch.full((4,), float(rank + 1)) for rank in range(4)]
    rows = [whole[0] + whole[1], whole[0] + whole[1], whole[2] + whole[3], whole[2] + whole[3]]
    scattered = [rows[rank].chunk(2)[rank % 2] for rank in range(4)]
    reduced = [scattered[rank % 2] + scattered[rank % 2 + 2] for rank in range(4)]
    scaling = Scaling.of(4, torch.float32)
    for piece in reduced:
        scaling.complete(piece)
    listed = ", ".join(str(piece.tolist()) for piece in scattered)
    return {"scattered": listed, "divisor": scaling.after, "reduced": reduced[0].tolist()}


def overflow() -> Values:
    numbers = torch.full((8,), 16000.0, dtype=torch.float16)
    scaling = Scaling.of(8, torch.float16)
    late, early = torch.zeros((2,), dtype=torch.float16)
    for number in numbers:
        late, early = late + number, early + number / scaling.before
    return {"late": late.item() / 8, "early": early.item() / scaling.after, "scaling": scaling}


def post_order() -> Values:
    events = events_of(STEP.format("full-post"))[0]
    wanted = [("AG", "block2"), ("FREE", "block3"), ("RS", "block3")]
    start = max(n for n, e in enumerate(events) if e.kind == "B" and e.unit.endswith("block3"))
    found = [f"{e.kind}{e.unit[-1]}" for e in events[start:] if (e.kind, e.unit.rpartition(".")[2]) in wanted]
    return {"order": " ".join(found[:3])}


def alive() -> Values:
    counts = []
    for key in ("full-pre", "full-off"):
        held: set[str] = set()
        most = 0
        for event in events_of(STEP.format(key))[0]:
            held = held | {event.unit} if event.kind == "AG" else held - {event.unit} if event.kind == "FREE" else held
            most = max(most, len(held))
        counts.append(most)
    return {"counts": counts}


def stops_of_the_limiter() -> Values:
    limiter = RateLimiter(enabled=True)
    stops: list[int] = []
    for number in range(6):
        limiter.throttle(f"block{number}")
        release: Any = SimpleNamespace(query=lambda: False, synchronize=lambda: stops.append(number))  # noqa: B023
        limiter.released(release)
    return {"first": stops[0], "limiter": limiter, "all": ", ".join(map(str, stops))}


def hybrid_slip() -> Values:
    world, per_host = 16, 8
    return {
        "replicated": 2 * (world - 1) / world,
        "sharded": 3 * (world - 1) / world,
        "paper": hybrid_cross_host_as_printed(1, world, per_host),
        "exact": hybrid_cross_host(1, world, per_host),
    }


def strategy_bytes() -> Values:
    weight, sent = {"AG": 1, "RS": 1, "AR": 2}, {}
    for key in ("full", "zero2", "none"):
        run = STEP.format(f"{key}-pre")
        model = sum(unit["bytes"] for unit in find(run)["units"])
        sent[key] = sum(weight.get(event.kind, 0) * event.num_bytes for event in events_of(run)[0]) / model
    return sent


def small_updates() -> Values:
    narrow, wide = torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0)
    for _ in range(100):
        narrow += 0.001
        wide += 0.001
    return {"narrow": narrow.item(), "wide": wide.item(), "eps": torch.finfo(torch.bfloat16).eps}


def ragged() -> Values:
    first, second = torch.tensor([4.0]), torch.tensor([0.0, 0.0, 0.0])
    return {"ranks": (first.mean() + second.mean()) / 2, "single": torch.cat([first, second]).mean()}


def rank_0_saves() -> Values:
    return {"shape": tuple(shard_shape(torch.Size((10, 4)), 0, 4, 0))}
