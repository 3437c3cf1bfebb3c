"""Spec accounting and the choice of device for the whole suite."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402

from spec_tests.harness import pool  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu")


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("spec(*ids): rows of the spec that the test proves", "ranks: on ranks", "pure: no ranks", "gpu: needs CUDA"):
        config.addinivalue_line("markers", marker)
    pool.use_device(config.getoption("--device"))


def pytest_sessionfinish() -> None:
    pool.close_all()
