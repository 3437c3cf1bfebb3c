"""Debug check ``order``: compares the order of all-gathers before each of them.

By default, ranks compare their all-gathers only before the first all-gather of each unit, to save time
(``engine/rank_checks.py``). If the order differs only in a later iteration, for instance because a batch has an image
or an expert got no tokens, this is not detected. Two units of equal size then get each other's weights. With this
check, every all-gather of a forward is compared first, and a difference raises an error with both names.

Worked example, two ranks, units ``a`` and ``b``; both ranks run ``a b`` in the first iteration, and rank 1 runs ``b a``
in the second. Then both ranks raise an error that contains "rank 0: 'a', rank 1: 'b'".

Cost: one small collective for each unit and forward, and a wait for it.

*In torch:* FSDP1 compares with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, FSDP2 never.

Spec: DEBUG-07; NEW-19 is the check itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from minifsdp.engine.rank_checks import RankChecks


@contextmanager
def always_compared() -> Iterator[None]:
    """Compares every all-gather of a forward inside the block."""
    RankChecks.always = True
    try:
        yield
    finally:
        RankChecks.always = False
