"""``minifsdp.cost``: what a job will store, send and hold at its peak; the code is in ``tools/cost.py``."""

from minifsdp.tools.cost import *  # noqa: F403
