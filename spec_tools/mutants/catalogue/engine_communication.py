"""Mutants of collectives, process groups, reductions, and checks between ranks."""

from __future__ import annotations

from spec_tests.harness.edit import always, never, remove, replace
from spec_tools.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = [
    # --- checks/collective_log.py ---
    Mutant(
        "log-without-entries",
        "LEDGER-01",
        "The collective log records nothing.",
        replace("CollectiveLog.record", "$sequence.entries.append", "len"),
    ),
    Mutant(
        "a-sequence-keeps-its-group",
        "HEALTHY-06",
        "Process groups are never freed.",
        replace(
            "CollectiveSequence.__init__",
            "weakref.ref(group.process_group)",
            "lambda: group.process_group",
        ),
    ),
    Mutant(
        "names-end-a-job",
        "HEALTHY-04",
        "Ranks that build the same units in other models count as issuing different collectives.",
        replace("CollectiveLog.record", "hash(($shape, *$parts))", "hash((shape, of_unit, *parts))"),
    ),
    Mutant(
        "a-rank-ends-the-groups-of-others",
        "LEDGER-19",
        "If ranks are threads, the first one that destroys its groups ends the groups of the others.",
        replace(
            "CollectiveLog.record",
            "$sequence.store() is None",
            "not all(o.store() for o in [*self.sequences.values()])",
        ),
    ),
    # --- engine/collectives.py ---
    Mutant(
        "sum-instead-of-mean",
        "SHARD-06 HYB-05",
        "Gradients are the sum over the ranks, not the mean.",
        remove("Scaling.complete", "$local_shard.div_(self.after)"),
    ),
    Mutant(
        "float16-mean-is-divided-after-the-sum",
        "SHARD-06",
        "A float16 mean is divided after the sum has overflowed.",
        never("Scaling.of", "$divisor % $before == 0 and $divisor / $before > $before"),
    ),
    Mutant(
        "broadcast-from-the-last",
        "SYNC-02 SYNC-05",
        "Initial values are broadcast from the last rank.",
        replace("broadcast", "$options.rootRank = $source", "$options.rootRank = group.size - 1"),
    ),
    Mutant(
        "last-collective-keeps-its-tensors",
        "LEDGER-01",
        "The handle of a complete collective keeps its tensors alive.",
        remove("Collective.wait", "self._work = None"),
    ),
    # --- engine/comm_streams.py ---
    Mutant(
        "event-is-not-waited-for",
        "STREAM-03",
        "The compute stream does not wait for the work on a communication stream.",
        remove("_EventHandle.wait", "current_stream(self._device).wait_event(self._event)"),
    ),
    Mutant(
        "offloading-gathers-are-not-waited-for",
        "STREAM-16",
        "An optimizer on the CPU writes to shards that an all-gather still reads.",
        remove("CommStream.synchronize", "self.stream.synchronize()"),
    ),
    # --- minifsdp_gloo/transport.py ---
    Mutant(
        "own-part-is-not-summed",
        "WIRE-01",
        "A reduce-scatter omits this rank's own gradient.",
        replace("Transport.reduce_scatter_single", "list($own)", "[torch.zeros_like(part) for part in $own]"),
    ),
    Mutant(
        "waits-where-it-issues",
        "WIRE-05",
        "An all-gather blocks the CPU until it is complete.",
        replace(
            "Transport._send_to_all",
            "return _Exchange($messages, self._in_flight)",
            "_Exchange($messages, self._in_flight).wait()\nreturn _Exchange([], self._in_flight)",
        ),
    ),
    Mutant(
        "messages-are-kept-for-good",
        "WIRE-09",
        "The memory of completed messages is never released.",
        never("_Exchange.wait", "self in self._in_flight"),
    ),
    Mutant(
        "failed-messages-pass",
        "WIRE-08",
        "After the death of a rank, the other ranks continue with invalid data.",
        replace("_Exchange.wait", "$message.wait()", "try:\n    $message.wait()\nexcept RuntimeError:\n    pass"),
    ),
    Mutant(
        "sizes-asked-about-once",
        "ORDER-10",
        "A size that was compared once at a position is never compared again.",
        replace("Transport.check_size", "self._known.get($order) == $shape", "$order in self._known"),
    ),
    # --- engine/mesh.py ---
    Mutant(
        "nodes-replicate-inside",
        "HYB-03",
        "Ranks of one node replicate, and each shard group spans several nodes.",
        replace("node_groups", "made[$key] = ($shard, $replicate)", "made[$key] = ($replicate, $shard)"),
    ),
    Mutant(
        "replicas-are-not-reduced",
        "SHARD-11 SHARD-12",
        "NO_SHARD does not reduce gradients, so each rank trains on its own.",
        replace("MeshGroups.replicated", "$group if $group.size > 1 else None", "None"),
    ),
    Mutant(
        "rank-of-the-world-for-place-in-the-group",
        "CTOR-06 HYB-02",
        "A rank uses its global rank instead of its rank in the group.",
        replace("Group.of", "$process_group.rank", "dist.get_rank"),
    ),
    Mutant(
        "covered-by-row-and-column-alone",
        "MYTH-28",
        "A 2 x 2 mesh counts as smaller than the world.",
        replace(
            "_covers",
            "$mesh.num_ranks == dist.get_world_size() or $known.issuperset($ranks)",
            "$known.issuperset($ranks)",
        ),
    ),
    # --- engine/messages.py ---
    Mutant(
        "a-folder-called-minifsdp-is-the-package",
        "START-01",
        "A warning searches for the package's name in file paths.",
        replace(
            "warn",
            "$frame.f_globals.get('__name__', '').partition('.')[0] in NOT_THE_PROGRAM",
            "'minifsdp' in $frame.f_code.co_filename",
        ),
    ),
    # --- checks/rank_checks.py ---
    Mutant(
        "order-is-not-checked",
        "NEW-19",
        "While debugging, units in another order only cause a warning.",
        never("RankChecks.backward_ends", "self.is_strict or self._is_detailed"),
    ),
    Mutant(
        "two-roots-ask-twice",
        "HEALTHY-04",
        "A rank with two roots compares twice in a backward in which a rank with one root compares once.",
        remove("RankChecks.backward_begins", "$backwards.setdefault(...).add(self)"),
    ),
    Mutant(
        "a-frozen-backward-asks",
        "ORDER-08 HEALTHY-02",
        "A backward through frozen parameters, which issues no collective, is compared.",
        always("RankChecks._groups_to_ask", "$sequence in self._used"),
    ),
    Mutant(
        "equal-units-are-one-unit",
        "ORDER-01",
        "Ranks can run equal units in different order without a warning.",
        never("RankChecks.read_now", "$has_other_units and not self._has_warned_of_units"),
    ),
    Mutant(
        "uneven-steps-without-a-warning",
        "ORDER-13",
        "no_sync() on one rank of a model that stays unsharded causes no warning.",
        never("RankChecks.read_now", "len(set($have_stepped)) > 1 and not self._has_warned_of_steps"),
    ),
    # --- engine/reduce.py ---
    Mutant(
        "hybrid-divides-by-the-shards-only",
        "HYB-05 SHARD-12",
        "The mean divides by the size of the shard group only and omits the replicas.",
        replace("ReducePlan.mean", "$mesh.num_ranks", "$mesh.num_shards"),
    ),
    Mutant(
        "hybrid-forgets-the-all-reduce",
        "HYB-04 HYB-09",
        "Under hybrid strategies the all-reduce is omitted, so each replica trains on its own.",
        replace("_end", "$plan.mesh.shard is not None or not $item.all_reduces", "not $item.all_reduces"),
    ),
    Mutant(
        "last-reduction-stays-away",
        "SHARD-06",
        "The last reduction of a backward never reaches the optimizer.",
        remove("Reducer.finish", "self._complete($last)"),
    ),
    Mutant(
        "cpu-goes-on-too-early",
        "STREAM-10",
        "The CPU reads offloaded gradients before they have arrived.",
        remove("Reducer._stop_cpu", "current_stream(self.comm_streams.device).synchronize()"),
    ),
    Mutant(
        "gather-does-not-follow-the-hooks",
        "STREAM-16",
        "An all-gather after an optimizer step in backward reads the values from before the step.",
        remove("Reducer._complete", "$all_gather.wait_compute()"),
    ),
    Mutant(
        "packed-gradients-are-kept",
        "STREAM-17",
        "Two packed gradients are in memory at the same time.",
        replace(
            "Reducer.before_concat",
            "$last.whole = $last.local_shard",
            "$last.scattered = COMPLETED",
        ),
        "simulated",
    ),
    Mutant(
        "partial-sums-are-dropped",
        "NEW-08",
        "A partial sum that waits for its all-reduce is dropped.",
        remove("_add_partial", "$item.local_shard.add_($item.partial)"),
    ),
]
