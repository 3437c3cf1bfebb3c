"""Writes the pictures of ``docs/assets/streams``: ``python -m spec_tests.streams.pictures``.

=============  =====================================================================================================
``wrapper``    order of the operations in one step of ``FullyShardedDataParallel`` (see ``order.py``)
``function``   the same for ``fully_shard``
``hybrid``     the same for ``fully_shard`` on a mesh of 2 times 2 ranks
``prefetch``   timelines of three settings of ``backward_prefetch`` (see ``timelines.py``)
``limiter``    timelines with and without the rate limiter
=============  =====================================================================================================

The pictures depend only on the engine: the same engine gives the same bytes, which a test compares. If the test fails,
the waits of the engine have changed. Look at the new picture, and check it in if the change is intended.

Spec: SIM-11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from spec_tests.harness import device, pool
from spec_tests.harness.accounting import ROOT
from spec_tests.streams import blocks, order, timelines
from spec_tests.streams.steps import Step, recorded
from spec_tests.subject import BackwardPrefetch

__all__ = ["FOLDER", "NUM_RANKS", "drawn"]

FOLDER = ROOT / "docs" / "assets" / "streams"
NUM_RANKS = 4
WIDE = 256
"""Width and rows of the timelines' blocks; large enough that bytes take longer than launches."""


def drawn() -> Iterator[tuple[str, str]]:
    """The name and text of each picture. The caller is one of `NUM_RANKS` ranks; the others are fake ranks."""
    prefetch = {"BACKWARD_PRE": BackwardPrefetch.BACKWARD_PRE, "BACKWARD_POST": BackwardPrefetch.BACKWARD_POST}
    yield "wrapper", order.picture("FullyShardedDataParallel, three blocks", narrow(blocks.flat))
    yield "function", order.picture("fully_shard, three blocks", narrow(blocks.per_parameter))
    yield "hybrid", order.picture("fully_shard, hybrid, three blocks", narrow(blocks.per_parameter, shape=(2, 2)))
    panels = [(name, wide(backward_prefetch=value)) for name, value in [*prefetch.items(), ("None", None)]]
    yield "prefetch", timelines.comparison("Three settings of backward_prefetch", panels)
    panels = [(f"limit_all_gathers={is_on}", wide(limit_all_gathers=is_on)) for is_on in (True, False)]
    yield "limiter", timelines.comparison("With the rate limiter, and without", panels)


def narrow(api: Callable[..., Any], **options: Any) -> Step:
    """A step of a small model, for pictures of the order."""
    return recorded(api(3, **options), torch.randn(3, blocks.WIDTH, device=device()))


def wide(**options: Any) -> Step:
    """A step of the wrapper with large tensors, for timelines."""
    return recorded(blocks.flat(4, WIDE, **options), torch.randn(WIDE, WIDE, device=device()))


def main() -> None:
    """Writes all pictures."""
    pool.use_device("simulated")
    dist.init_process_group("simulated", rank=0, world_size=NUM_RANKS, store=FakeStore())
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in drawn():
        (FOLDER / f"{name}.svg").write_text(text, encoding="utf-8")
        print(f"wrote {FOLDER.relative_to(ROOT)}/{name}.svg")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
