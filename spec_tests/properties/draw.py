"""Draws random descriptions with hypothesis.

Only its generator is used. A description takes a few milliseconds on a warm pool of ranks and most of a second on a
cold one. So all descriptions are drawn first and then run in batches; ``hunt.py`` reduces failing ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from spec_tests.properties.build import PRECISIONS
from spec_tests.properties.description import CONTAINERS, LEAVES, Description, Node, forms_of, legal

__all__ = ["collected", "descriptions", "drawn", "resuming"]

T = TypeVar("T")

PLAIN = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
often = st.sampled_from([True, True, False])
seldom = st.sampled_from([False, False, False, False, True])


@st.composite
def _nodes(draw: st.DrawFn, depth: int) -> Node:
    is_leaf = depth == 0 or draw(st.booleans())
    children: tuple[Node, ...] = ()
    if not is_leaf:
        children = tuple(draw(st.lists(_nodes(depth - 1), min_size=1, max_size=3)))
    return Node(
        kind=draw(st.sampled_from(LEAVES if is_leaf else CONTAINERS[:1] * 3 + CONTAINERS)),
        size=draw(st.integers(0, 7)),
        unit=draw(st.booleans()),
        frozen=draw(seldom),
        times=draw(st.sampled_from([1, 1, 1, 2, 3])),
        checkpoint=draw(st.sampled_from(["", "", "", "nonreentrant", "reentrant"])),
        returns=draw(st.sampled_from(["tensor", "tensor", "tuple", "dict", "nested"])),
        keywords=draw(seldom),
        every=2 if draw(st.integers(0, 9)) == 9 else 1,
        same_as=draw(st.sampled_from([-1, -1, -1, 0, 1, 2])),
        strategy=draw(st.sampled_from(["", "", "", *PLAIN])),
        children=children,
    )


@st.composite
def descriptions(draw: st.DrawFn, num_ranks: int, api: str) -> Description:
    """Meaningful descriptions for this number of ranks and this front end."""
    micro_batches = draw(
        st.sampled_from([(True,), (True,), (True,), (False, True), (True, True), (False, False, True)])
    )
    if draw(seldom):
        micro_batches = draw(
            st.sampled_from([(True, False, True), (False, True, False, True), (True, False, False, True)])
        )
    root = Node("chain", children=tuple(draw(st.lists(_nodes(2), min_size=1, max_size=4))))
    pair = st.tuples(st.integers(0, 5), st.integers(1, 6))
    drawn = Description(
        model=root,
        num_ranks=num_ranks,
        api=api,
        width=draw(st.integers(1, 5)),
        strategy=draw(st.sampled_from([*PLAIN, *PLAIN, *HYBRID])),
        num_replicas=draw(st.sampled_from([1, 2, num_ranks])),
        originals=draw(st.booleans()),
        precision=draw(st.sampled_from(["full", "full", *PRECISIONS])),
        backward_prefetch=draw(st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST", ""])),
        forward_prefetch=draw(st.booleans()),
        limits=draw(often),
        offload=draw(seldom),
        by_policy=draw(st.booleans()),
        ties=tuple(draw(st.lists(pair, max_size=2))),
        steps=draw(st.sampled_from([2, 2, 3])),
        micro_batches=micro_batches,
        forwards=draw(st.sampled_from([1, 1, 1, 2])),
        samples=draw(st.integers(1, 3)),
        momentum=draw(st.booleans()),
        clears=draw(often),
        evaluates=draw(st.sampled_from(["", "", "after", "between", "forgotten"])),
        clips=draw(seldom),
        bomb=draw(st.sampled_from(["", "", "", "", "forward", "backward"])),
        bomb_at=draw(st.integers(0, 5)),
        edits=draw(seldom),
        saves=draw(seldom),
        tracks_input=draw(seldom),
        apart=draw(st.sampled_from([-1, -1, -1, 0, 1, 2])),
        seed=draw(st.integers(0, 99)),
    )
    return legal(drawn)


def drawn(num: int, number: int, num_ranks: int, api: str) -> list[Description]:
    """``num`` descriptions; the same ``number`` (seed) gives the same ones."""
    return collected(descriptions(num_ranks, api), num, number)


def resuming(num: int, number: int, num_ranks: int, api: str) -> list[Description]:
    """Descriptions with more options: other optimizers, gradient hooks, a state that is saved and loaded."""
    strategy = st.builds(
        lambda d, adam, hook, form: legal(replace(d, adam=adam, hook=hook, resumes=form)),
        descriptions(num_ranks, api),
        adam=st.booleans(),
        hook=st.sampled_from(["", "", "communication", "accumulated", "backward"]),
        form=st.sampled_from(forms_of(api)),
    )
    return collected(strategy, num, number)


def collected(strategy: st.SearchStrategy[T], num: int, number: int) -> list[T]:
    """``num`` examples; the same ``number`` (seed) gives the same ones."""
    found: list[T] = []

    @seed(number)
    @settings(
        max_examples=num, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def keep(example: Any) -> None:
        found.append(example)

    keep()
    return found
