"""The order of all gathers, compared before each of them.

Ranks compare what they gather before the first gather of each unit (``engine/order_check.py``), for that is all that
training pays for. An order that differs only in some later iteration, because a batch has an image or an expert got no
tokens, passes: two units of equal size then get each other's weights. With this check on it is compared before every
gather of a forward, and the ranks part with both names.

Worked example, two ranks, units ``a`` and ``b``; both ranks run ``a b`` in the first iteration, and rank 1 runs ``b a``
in the second: "the ranks are about to gather different units, rank 0: 'a', rank 1: 'b'", on both.

Price: one small collective, and one wait for it, for each unit and forward.

*In torch:* FSDP1 compares with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, FSDP2 never.

Spec: DEBUG-07; NEW-19 is the check itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from minifsdp.engine import order_check


@contextmanager
def always_compared() -> Iterator[None]:
    """Inside the block every gather of a forward is asked for."""
    order_check.always = True
    try:
        yield
    finally:
        order_check.always = False
