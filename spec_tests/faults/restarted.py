"""The tutorial's training, in whose first life rank 1 is killed, or raises, in the middle of step 4.

    torchrun --nproc-per-node 2 --max-restarts 1 spec_tests/faults/restarted.py FAULT FOLDER

Checkpoints are saved every second step. In the end rank 0 writes the losses of all steps to ``FOLDER/told``, and how
often the job was started.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tutorials"), str(ROOT)]
STEPS, STRUCK_IN = 6, 4
TINY = ["--device=cpu", "--blocks=1", "--width=16", "--heads=2", "--context=16", "--batch=2", "--sample=1", "--lr=0.1"]


def main() -> None:
    import train_gpt

    from spec_tests.tutorials.killing import corpus

    torch.set_num_threads(1)
    fault, folder = sys.argv[1:]
    step = torch.optim.AdamW.step
    strikes = fault != "none" and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    number = 0

    def strike(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal number
        number += 1
        if strikes and number == STRUCK_IN:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a bad batch")
        return step(self, *args, **kwargs)

    torch.optim.AdamW.step = strike  # type: ignore[method-assign]
    runs = str(Path(folder) / "runs")
    options = train_gpt.parse([*TINY, f"--steps={STEPS}", "--save-every=2", f"--save={runs}", f"--resume={runs}"])
    with train_gpt.joined_ranks("cpu") as place:
        losses = train_gpt.train(options, corpus(train_gpt), place)
    if os.environ["RANK"] == "0":
        lives = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
        (Path(folder) / "told").write_text(json.dumps({"losses": losses, "lives": lives}))


if __name__ == "__main__":
    main()
