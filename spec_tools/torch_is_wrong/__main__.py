"""Runs each program with the installed torch and checks whether its output matches the page."""

from __future__ import annotations

import torch

from spec_tools.torch_is_wrong import cases, is_said, said_by_torchrun

if __name__ == "__main__":
    for case in cases():
        found = said_by_torchrun(case)
        verdict = "wrong in the same way" if is_said(case.in_torch, found) else f"another answer: {found}"
        print(f"torch {torch.__version__}, {case.name}: {verdict}", flush=True)
