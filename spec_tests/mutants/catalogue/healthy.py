"""Mutants of HEALTHY: checks that end, reject or slow down correct programs, and leftovers of such checks."""

from __future__ import annotations

from spec_tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = [
    Mutant(
        "names-of-wrappers-count",
        "clean_path",
        " or part in _OF_WRAPPERS",
        "",
        "Ranks that wrap their modules differently count as issuing different collectives.",
        "HEALTHY-04",
    ),
    Mutant(
        "indices-of-modules-count",
        "clean_path",
        "part.isdigit() or ",
        "",
        "Ranks with different numbers of ignored modules count as issuing different collectives.",
        "HEALTHY-04",
    ),
    Mutant(
        "equal-units-are-one-unit",
        "Unit.named",
        "        num_equal[equal] += 1\n",
        "",
        "Ranks can run equal units in different order without an error.",
        "ORDER-01",
    ),
    Mutant(
        "all-gathers-wait-when-they-are-issued",
        "Collective.__init__",
        'if self._sizes_agree is not None and kind != "all-gather":',
        "if self._sizes_agree is not None:",
        "Issuing an all-gather waits for other ranks.",
        "HEALTHY-05",
    ),
    Mutant(
        "a-destroyed-group-leaves-its-keys",
        "StoreChannel.delete_keys",
        "self._of_group.delete_key(key)",
        "pass",
        "A rank of a new group connects to an address of the destroyed group.",
        "HEALTHY-06",
    ),
    Mutant(
        "the-watchdog-outlives-its-group",
        "_stop",
        "watchdog.stop()",
        "pass",
        "The watchdog thread continues after the process group was destroyed.",
        "HEALTHY-06",
    ),
    Mutant(
        "a-sequence-keeps-its-group",
        "CollectiveSequence.__init__",
        "weakref.ref(process_group)",
        "lambda: process_group",
        "Process groups are never freed.",
        "HEALTHY-06",
    ),
    Mutant(
        "later-handlers-are-ignored",
        "handles_sigterm",
        "signal.getsignal(signal.SIGTERM) is _wait_for_report",
        "True",
        "A SIGTERM ends a program that has its own handler for it.",
        "HEALTHY-08 LEDGER-06",
    ),
    Mutant(
        "errors-that-a-shell-has-shown-end-the-program",
        "_leave_exit_record",
        "trace.tb_frame.f_back is not None",
        "False",
        "An error in an interactive console is reported as the end of the program.",
        "HEALTHY-12",
    ),
    Mutant(
        "a-child-wakes-its-parent",
        "_forget_in_child",
        "_leave_signals()",
        "pass",
        "A forked process keeps the signal handler of its parent.",
        "LEDGER-06",
    ),
    Mutant(
        "reports-follow-links",
        "written",
        'tempfile.NamedTemporaryFile("w", dir=folder, prefix=prefix, suffix=".json", delete=False)',
        'Path(folder, f"{prefix}.json").open("w")',
        "A report is written through a symbolic link of another user.",
        "LEDGER-20",
    ),
    Mutant(
        "events-are-queried-at-once",
        "Watchdog._is_stuck",
        "if at is None or time.monotonic() - self._stuck_since <= self._patience:",
        "if at is None or (waiting is not None and time.monotonic() - self._stuck_since <= self._patience):",
        "The watchdog queries an event while the program issues work.",
        "LEDGER-21",
    ),
]
