"""``minifsdp.cost``: estimates of a job's memory, traffic and peak memory. The code is in ``tools/cost.py``.

``tools/activations.py`` estimates the memory that depends on the batch. ``tools/links.py`` estimates traffic by link.
"""

from minifsdp.tools.activations import *  # noqa: F403
from minifsdp.tools.cost import *  # noqa: F403
from minifsdp.tools.links import *  # noqa: F403
