"""Searches for the best setting of a model on given machines.

The search simulates each combination of strategy, unit size, shards of a hybrid strategy, micro-batch and activation
checkpointing. Simulating a large model takes seconds, so each combination is first simulated with two small numbers
of layers. Time and memory grow by the same amount with each further layer, so two simulations predict the model with
all its layers. Then the best settings that fit into memory are simulated with all layers.

Worked example, a setting takes 50 ms with 2 layers and 70 ms with 4: each layer takes 10 ms, so 32 layers take 350 ms.

*In torch:* ``torch.distributed._tools`` has a solver for activation checkpointing.

Spec: SIMULATE-14.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from minifsdp_tools.simulate.machine import Card, Network
from minifsdp_tools.simulate.recording import record
from minifsdp_tools.simulate.replay import Result, replay
from minifsdp_tools.simulate.report import USABLE
from minifsdp_tools.simulate.setup import HYBRID, Setup
from minifsdp_tools.simulate.shapes import Shape

_FEWER = (2, 4)


def search(
    base: Setup, card: Card, network: Network, num_best: int = 3
) -> tuple[list[tuple[Setup, Result]], int]:
    """Finds the settings with the most tokens per second that fit into the card's memory.

    Args:
        base: the model, the ranks and all choices that the search does not change.
        card, network: the machines.
        num_best: the number of settings to simulate with all layers.

    Returns:
        All settings with their results, the best ones first, then the others in the order of their predicted speed. And
        the number of settings at the beginning that were simulated with all layers and that fit.

    Raises:
        ValueError: if the model is given by a function.
    """

    def rank(run: tuple[Setup, Result]) -> tuple[bool, float]:
        return not _fits(run[1], card), -run[1].tokens_per_second

    predicted = sorted(
        (
            (setup, _predicted(setup, base.shape, card, network))
            for setup in candidates(base)
        ),
        key=rank,
    )
    num_simulated = min(num_best, sum(_fits(result, card) for _, result in predicted))
    best = [
        (setup, replay(record(setup), card, network))
        for setup, _ in predicted[:num_simulated]
    ]
    return [*sorted(best, key=rank), *predicted[num_simulated:]], sum(
        _fits(result, card) for _, result in best
    )


def candidates(base: Setup) -> Iterator[Setup]:
    """The settings of the search."""
    for strategy in (
        "FULL_SHARD",
        "SHARD_GRAD_OP",
        "HYBRID_SHARD",
        "_HYBRID_SHARD_ZERO2",
    ):
        for shards in _splits(base) if strategy in HYBRID else [None]:
            chosen = replace(base, strategy=strategy, num_shards=shards)
            for unit, size, kind in product(
                (1, 2), (1, 2, 4, 8), ("none", "selective", "full")
            ):
                yield replace(chosen, unit=unit, micro_batch=size, checkpointing=kind)


def _splits(base: Setup) -> list[int]:
    """The numbers of shards of a copy: one machine, and twice and four times as many, if there are several copies."""
    sizes = (base.ranks_per_machine * times for times in (1, 2, 4))
    return [
        size for size in sizes if size < base.num_ranks and base.num_ranks % size == 0
    ]


def _fits(result: Result, card: Card) -> bool:
    return result.peak_held <= USABLE * card.memory


def _predicted(setup: Setup, shape: Shape, card: Card, network: Network) -> Result:
    few, more = (min(shape.layers, setup.unit * number) for number in _FEWER)
    first, second = (
        replace(setup, model=replace(shape, layers=number)) for number in (few, more)
    )
    result = replay(record(first), card, network)
    if few == more:
        return result
    return extrapolated(
        [result, replay(record(second), card, network)], (few, more), shape.layers
    )


def extrapolated(
    runs: Sequence[Result], layers: tuple[int, int], wanted: int
) -> Result:
    """The result for ``wanted`` layers, from those of two smaller numbers of layers."""
    first, second = runs
    factor = (wanted - layers[0]) / (layers[1] - layers[0])

    def line(low: float, high: float) -> float:
        return low + factor * (high - low)

    seconds = line(first.seconds, second.seconds)
    return replace(
        second,
        seconds=seconds,
        compute_seconds=line(first.compute_seconds, second.compute_seconds),
        exposed_seconds=max(0.0, line(first.exposed_seconds, second.exposed_seconds)),
        host_seconds=line(first.host_seconds, second.host_seconds),
        waits=line(first.waits, second.waits),
        tokens_per_second=second.tokens_per_second * second.seconds / seconds,
        mfu=line(first.mfu * first.seconds, second.mfu * second.seconds) / seconds,
        hfu=line(first.hfu * first.seconds, second.hfu * second.seconds) / seconds,
        stored_bytes=round(line(first.stored_bytes, second.stored_bytes)),
        peak_allocated=round(line(first.peak_allocated, second.peak_allocated)),
        peak_held=round(line(first.peak_held, second.peak_held)),
        memory=(),
        events=(),
        busy={
            kind: line(first.busy.get(kind, 0.0), time)
            for kind, time in second.busy.items()
        },
    )
