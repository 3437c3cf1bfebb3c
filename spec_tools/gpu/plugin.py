"""The plugin of pytest with the options of `spec_tools.gpu.suite`. pytest loads it before each ``conftest.py``."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

SUPPOSED_MEMORY = 80 << 30


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    parser.addoption("--gpu-stages", nargs="+", default=[], help="the stages that run")
    parser.addoption("--gpu-until", type=float, default=math.inf, help="the moment at which the run ends")
    parser.addoption("--gpu-cases", type=Path, help="collects only, and writes the tests of each stage into this file")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the suite."""
    # Now, because the assertions of its modules are rewritten only after the suite of tests has asked for it.
    from spec_tools.gpu.suite import Suite

    config.pluginmanager.register(Suite(config.option.gpu_stages, config.option.gpu_until))
    if config.option.gpu_cases and not torch.cuda.is_available():
        # A plan for one GPU, made on a machine without one.
        torch.cuda.device_count = lambda: 1
        torch.cuda.mem_get_info = lambda device=None: (SUPPOSED_MEMORY, SUPPOSED_MEMORY)
