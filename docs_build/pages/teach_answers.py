"""The values in the questions of the lab and in their answers.

Each function has the name of a question in ``teach.md``.
"""

import io
from typing import Any

import torch

from docs_build.drawing.pictures import events_of
from docs_build.recording.recordings import find
from minifsdp.engine.collectives import Scaling
from minifsdp.engine.flat_tensor import FlatSharding
from minifsdp.engine.lifetime import RateLimiter
from minifsdp.engine.shards import shard_shape
from minifsdp_tools.events import peak_gathered_bytes
from minifsdp_tools.formulas import ring_all_reduce_sends, ring_sends, size_of

Values = dict[str, Any]


def peak(kind: str) -> str:
    """The peak of unsharded parameters in a recorded step, as in ``4.2 MB``."""
    return size_of(peak_gathered_bytes(events_of(f"fsdp1-{kind}-block-2-wide")[0]))


def whole_model() -> str:
    """The size of the model of the recorded steps."""
    return size_of(sum(unit["bytes"] for unit in find("fsdp1-full-pre-block-2-wide")["units"]))


def flatten_last_rank() -> Values:
    shapes, ranks = [(3, 2), (4,)], 3
    numels = [torch.Size(shape).numel() for shape in shapes]
    flat = FlatSharding(numels, ranks)
    piece = flat.shard_range(ranks - 1)
    # The last shard has no element of a parameter if it begins after them.
    empty = next(n for n in range(1, 100) if FlatSharding(numels, n).shard_range(n - 1).start >= flat.numel)
    return {
        "shapes": ", ".join(map(str, shapes)),
        "ranks": ranks,
        "numel": flat.numel,
        "padded": flat.padded_numel,
        "first": piece.start,
        "last": piece.stop - 1,
        "padding": flat.padded_numel - flat.numel,
        "empty": empty,
    }


def reduce_instead() -> Values:
    ranks = 8
    all_reduce, reduce_scatter = ring_all_reduce_sends(1, ranks), ring_sends(1, ranks)
    ratio = all_reduce / reduce_scatter
    return {"ranks": ranks, "all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "ratio": ratio}


def reduce_factors() -> Values:
    ranks = 64
    scaling = Scaling.of(ranks, torch.float16)
    largest, small = torch.finfo(torch.bfloat16).max, torch.finfo(torch.float16).max
    return {"ranks": ranks, "before": scaling.before, "after": scaling.after, "largest": largest, "small": small}


def prefetch_memory() -> Values:
    return {"pre": peak("full-pre"), "post": peak("full-post"), "off": peak("full-off")}


def limiter_more() -> Values:
    return {"limit": RateLimiter(enabled=True).num_in_flight}


def no_sync_memory() -> Values:
    parameters, ranks = 200_000_000, 16
    unsharded = parameters * torch.float32.itemsize / 1e6
    return {"parameters": parameters, "ranks": ranks, "unsharded": unsharded, "sharded": unsharded / ranks}


def no_sync_dtype() -> Values:
    whole, one = 256.0, 1.0
    wide, narrow = (torch.tensor(whole, dtype=dtype) + one for dtype in (torch.float32, torch.bfloat16))
    distance = whole * torch.finfo(torch.bfloat16).eps
    return {"whole": whole, "one": one, "wide": wide.item(), "narrow": narrow.item(), "distance": distance}


def uneven_balanced() -> Values:
    rows, ranks = 9, 4
    of_chunk = [shard_shape(torch.Size((rows,)), 0, ranks, rank)[0] for rank in range(ranks)]
    balanced = [len(part) for part in torch.arange(rows).tensor_split(ranks)]
    return {"rows": rows, "ranks": ranks, "chunk": _listed(of_chunk), "balanced": _listed(balanced)}


def state_dict_copies() -> Values:
    units, numel = 8, 1000
    unit = torch.zeros(units, numel)
    view, copy = _saved_bytes(unit[0]), _saved_bytes(unit[0].clone())
    return {"units": units, "numel": numel, "times": view // copy, "view": view, "copy": copy}


def dtensor_shape() -> Values:
    shape, ranks = torch.Size((5, 2)), 3
    local = shard_shape(shape, 0, ranks, ranks - 1)
    guessed = (local[0] * ranks, *local[1:])
    return {"shape": tuple(shape), "ranks": ranks, "local": tuple(local), "guessed": guessed}


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _saved_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the storage that ``torch.save`` writes for a tensor."""
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file)
    return loaded.untyped_storage().nbytes()
