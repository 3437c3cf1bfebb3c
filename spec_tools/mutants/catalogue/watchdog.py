"""Mutants of the watchdog and of the debug checks."""

from __future__ import annotations

from spec_tests.harness.edit import never, remove, replace
from spec_tools.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = [
    # --- debugging/attach.py ---
    Mutant(
        "check-that-has-ended-stays",
        "DEBUG-03",
        "A debug check that has ended stays in the methods that it observed.",
        remove("attached", "setattr($owner, $name, $observed.__wrapped__)"),
    ),
    # --- debugging/freed.py ---
    Mutant(
        "freed-memory-is-read",
        "DEBUG-13",
        "The debug check `memory` does not notice reads of freed parameters.",
        replace("_FreedMemory.__torch_dispatch__", "not $value.untyped_storage().nbytes()", "False"),
    ),
    # --- debugging/switch.py ---
    Mutant(
        "debugging-compares-no-order",
        "DEBUG-07",
        "With the order check on, a different order in a later iteration is not detected before the all-gather.",
        replace("check_order", "True", "False"),
    ),
    # --- debugging/unset.py ---
    Mutant(
        "largest-integer-counts-as-unset",
        "DEBUG-08",
        "A buffer with the largest integer as one of its values is reported as not initialized.",
        replace(
            "_is_unset",
            "($values == torch.iinfo($values.dtype).max).all",
            "($values == torch.iinfo($values.dtype).max).any",
        ),
    ),
    # --- debugging/values.py ---
    Mutant(
        "an-infinite-value-is-finite",
        "DEBUG-05",
        "The debug check `values` does not report `inf`.",
        replace("_record_first", "$total.isfinite()", "$total.isnan().logical_not()"),
    ),
    Mutant(
        "error-about-values-leaves-a-forward",
        "DEBUG-06",
        "After an error of the debug check `values`, the units stay in the middle of a forward.",
        never("_agree", "$clean_up is not None"),
    ),
    # --- watchdog/process.py ---
    Mutant(
        "reports-follow-links",
        "LEDGER-20",
        "A report is written through a symbolic link of another user.",
        replace(
            "write_report", "tempfile.NamedTemporaryFile(...)", "open(os.path.join(folder, f'{prefix}.json'), 'w')"
        ),
    ),
    Mutant(
        "the-watchdog-outlives-its-group",
        "HEALTHY-06",
        "The watchdog thread continues after the process group was destroyed.",
        remove("_stop", "$watchdog.stop()"),
    ),
    Mutant(
        "forked-child-keeps-the-watchdog",
        "HEALTHY-09",
        "A forked child that fails closes the connections of its parent's process groups.",
        replace("Watchdog.is_of_this_process", "self._process == os.getpid()", "True"),
    ),
    # --- watchdog/report.py ---
    Mutant(
        "the-host-leaves-at-once",
        "LEDGER-16",
        "The exit record of the rank that hosts the store is lost when its process ends.",
        remove("StoreChannel.announce_exit", "self._call('add', 'host', 1)"),
    ),
    Mutant(
        "who-is-not-buried-lives",
        "LEDGER-18",
        "A killed process counts as running until its parent reaps it.",
        replace("has_ended", "$state in 'ZX'", "False"),
    ),
    Mutant(
        "crossed-waits-are-not-noticed",
        "AGREE-10",
        "Two ranks wait for each other in two groups until the time-out.",
        replace("Findings.prove_a_hang", "$on_cpu and any($waits for $rank in $ranks)", "False"),
    ),
    Mutant(
        "ranks-are-compared-in-the-epoch-of-the-first",
        "LEDGER-02",
        "Ranks in different epochs are compared in an epoch that not all of them have reached.",
        remove("different_ranks", "$epoch = min([$epoch, *($now[0] for $now, $_ in $both_of.values())])"),
    ),
    # --- watchdog/watchdog.py ---
    Mutant(
        "a-failed-look-is-the-last",
        "LEDGER-14",
        "The first exception ends the watchdog thread.",
        replace("Watchdog._run", "self._stopped.wait(TICK)", "return"),
    ),
    Mutant(
        "silence-is-waited-for",
        "LEDGER-18",
        "The watchdog does not check whether a silent rank still exists.",
        never("Watchdog._find", "$state is None and $channel.is_lost($rank)"),
    ),
    Mutant(
        "rank-that-continues-loses-its-groups",
        "LEDGER-03 LEDGER-13",
        "The watchdog closes the process group of a rank that continues meanwhile.",
        replace("Watchdog._examine", "$is_certain and log.last_position == $position", "$is_certain"),
    ),
    Mutant(
        "static-rendezvous-has-a-host",
        "MACHINES-11",
        "With torchrun's static rendezvous, rank 0 does not treat itself as the host of the store.",
        replace(
            "start",
            "os.environ.get('TORCHELASTIC_USE_AGENT_STORE') != 'True'",
            "'TORCHELASTIC_USE_AGENT_STORE' not in os.environ",
        ),
    ),
]
