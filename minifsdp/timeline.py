"""``minifsdp.timeline``: a picture or a Chrome trace from what was recorded; the code is in ``tools/timeline.py``."""

from minifsdp.tools.timeline import *  # noqa: F403
