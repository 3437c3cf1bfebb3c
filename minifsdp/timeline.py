"""``minifsdp.timeline``: a picture or a Chrome trace of a recorded training step. The code is in ``tools/``."""

from minifsdp.tools.chrome_trace import chrome_trace
from minifsdp.tools.events import gathered_bytes, peak_gathered_bytes
from minifsdp.tools.timeline import svg

__all__ = ["chrome_trace", "gathered_bytes", "peak_gathered_bytes", "svg"]
