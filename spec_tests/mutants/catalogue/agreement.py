"""Mutants of AGREE: ranks whose models, options or calls differ."""

from __future__ import annotations

from spec_tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = [
    Mutant(
        "order-of-construction-is-not-compared",
        "CollectiveSequence.agree",
        " and (len(numbers) == 1 or len(totals) > 1)",
        "",
        "Two models of one class run in another order with each other's weights.",
        "AGREE-01",
    ),
    Mutant(
        "uneven-numbers-of-models-are-refused",
        "CollectiveSequence.agree",
        " or len(totals) > 1",
        "",
        "A rank that has constructed one more model before cannot train.",
        "AGREE-02",
    ),
    Mutant(
        "frozen-layers-are-not-compared",
        "Unit._facts",
        ", requires_grad={mine.requires_grad}",
        "",
        "A layer that is frozen on one rank only is trained on gradients of the other ranks.",
        "AGREE-03",
    ),
    Mutant(
        "divisors-are-not-compared",
        "Unit._facts",
        "divided by {divisor:g}, ",
        "",
        "Ranks divide the shards of one gradient by different numbers.",
        "AGREE-04",
    ),
    Mutant(
        "summons-without-agreement",
        "all_gather_by_hand",
        "    agree(name, layout.mesh.shard, layout.device)\n",
        "",
        "Ranks that summon different units read each other's parameters.",
        "AGREE-05",
    ),
    Mutant(
        "calls-are-not-compared",
        "_wait_for_all",
        "if len(texts) > 1",
        "if not texts",
        "Ranks save state dicts of different types.",
        "AGREE-06",
    ),
    Mutant(
        "norms-are-not-compared",
        "_sum_over",
        'about = f" of the {float(norm_type)}-norm"',
        'about = ""',
        "Ranks with different norm types clip by a wrong norm.",
        "AGREE-07",
    ),
    Mutant(
        "a-second-thread-may-call",
        "RootState.check_thread",
        "if self._thread not in (0, get_ident()) and graph_task() == NOT_IN_BACKWARD:",
        "if False:",
        "Two threads use the memory of one model.",
        "AGREE-08",
    ),
    Mutant(
        "destroyed-groups-are-used",
        "CollectiveLog.clear",
        "sequence.hash = _DestroyedGroup()",
        "pass",
        "A forward after destroy_process_group() does not name the cause.",
        "AGREE-09",
    ),
    Mutant(
        "crossed-waits-are-not-noticed",
        "Findings.prove_a_hang",
        "crossed = on_cpu and any(",
        "crossed = False and any(",
        "Two ranks wait for each other in two groups until the time-out.",
        "AGREE-10",
    ),
    Mutant(
        "long-errors-are-sent",
        "_leave_exit_record",
        "str(error)[:_LONGEST]",
        "str(error)",
        "All ranks read the whole text of an error, which may be large.",
        "AGREE-11",
    ),
]
