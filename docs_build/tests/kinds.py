"""One page of each kind, for checks that would take too long on all pages."""

from __future__ import annotations

__all__ = ["KINDS"]

KINDS = (
    "index.html",
    "learn/why.html",
    "learn/schedule.html",
    "streams.html",
    "read/index.html",
    "read/engine/unit.html",
    "read/verbs.html",
    "read/path.html",
    "tutorials/index.html",
    "tutorials/overlap.html",
    "lab/slow_rank.html",
    "tools/player.html",
    "tools/calculator.html",
    "tools/placement.html",
    "tools/explain.html",
    "troubleshoot.html",
    "myths.html",
    "moving/from-ddp.html",
    "glossary.html",
    "evidence.html",
    "api.html",
    "spec.html",
    "design.html",
    "benchmarks.html",
    "404.html",
)
