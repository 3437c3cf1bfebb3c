"""Mutants of the step simulator."""

from __future__ import annotations

from spec_tests.harness.edit import never, remove, replace
from spec_tools.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = [
    # --- minifsdp_tools/simulate/__main__.py ---
    Mutant(
        "simulator-draws-nothing",
        "SIMULATE-13",
        "`--timeline` writes no file.",
        never("main", "$given.timeline"),
    ),
    # --- minifsdp_tools/simulate/device.py ---
    Mutant(
        "events-of-the-compute-stream",
        "SIMULATE-02",
        "A recorded event belongs to the compute stream, whatever stream recorded it.",
        replace("Stream.record_event", "RecordEvent(self.number, $number)", "RecordEvent(COMPUTE, $number)"),
    ),
    Mutant(
        "recording-without-waits",
        "SIMULATE-02",
        "A recording does not contain the waits of streams.",
        remove("Stream.wait_event", "self.tape.items.append(WaitEvent(self.number, $event.number))"),
    ),
    # --- minifsdp_tools/simulate/machine.py ---
    Mutant(
        "memory-takes-no-time",
        "SIMULATE-06",
        "An operator takes the time of its operations, also if its bytes take longer.",
        replace(
            "Card.seconds",
            "max($compute, $kernel.num_bytes / (self.bandwidth_efficiency * self.bandwidth))",
            "$compute",
        ),
    ),
    # --- minifsdp_tools/simulate/models.py ---
    Mutant(
        "two-embeddings",
        "SIMULATE-04",
        "The output matrix of a model is never the token embedding.",
        never("Transformer.__init__", "$shape.tied"),
    ),
    # --- minifsdp_tools/simulate/operators.py ---
    Mutant(
        "causal-attention-in-full",
        "SIMULATE-03",
        "Causal attention takes the time of attention to all positions.",
        replace("OperatorMode._append", "$flops / 2 if $given.get('is_causal') else $flops", "$flops"),
    ),
    # --- minifsdp_tools/simulate/recording.py ---
    Mutant(
        "recording-reduces-each-micro-batch",
        "SIMULATE-05",
        "A recording with `no_sync` reduces the gradients of each micro-batch.",
        replace("_train", "not $setup.no_sync or $number == $setup.accumulation - 1", "True"),
    ),
    # --- minifsdp_tools/simulate/replay.py ---
    Mutant(
        "collectives-of-a-group-overlap",
        "SIMULATE-10",
        "Collectives of one group on two streams run at the same time.",
        replace(
            "Replay._communicate",
            "max(self.ends[$c.stream], self.host, self._groups[$group])",
            "max(self.ends[$c.stream], self.host)",
        ),
    ),
    # --- minifsdp_tools/simulate/search.py ---
    Mutant(
        "every-setting-fits",
        "SIMULATE-14",
        "The search returns settings that need more memory than the card has.",
        replace("_fits", "$result.peak_held <= USABLE * $card.memory", "True"),
    ),
]
