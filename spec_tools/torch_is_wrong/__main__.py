"""Runs one program on this rank; or all programs with the installed torch, and compares what they say with the page."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from spec_tools.torch_is_wrong import TORCH, cases, is_said, said_by_torchrun

if __name__ == "__main__" and sys.argv[1:]:
    name, library = (*sys.argv[1:], TORCH)[:2]
    (chosen,) = (case for case in cases() if case.name == name)
    dist.init_process_group("gloo")
    said = chosen.run(library)
    if dist.get_rank() == 0:
        print(said)
    dist.destroy_process_group()
elif __name__ == "__main__":
    for case in cases():
        found = said_by_torchrun(case)
        verdict = "wrong in the same way" if is_said(case.in_torch, found) else f"another answer: {found}"
        print(f"torch {torch.__version__}, {case.name}: {verdict}", flush=True)
