"""``minifsdp.cost``: what a job will store, send and hold at its peak; the code is in ``tools/cost.py``.

What depends on the batch is estimated in ``tools/activations.py``, and what goes over which link in ``tools/links.py``.
"""

from minifsdp.tools.activations import *  # noqa: F403
from minifsdp.tools.cost import *  # noqa: F403
from minifsdp.tools.links import *  # noqa: F403
