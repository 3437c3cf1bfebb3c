"""The event recorder at a short import path: ``from minifsdp.trace import Recorder``.

The classes and the table of the events are in ``debugging/trace.py``.

*In torch:* no recorder of events.
"""

from minifsdp.debugging.trace import Event, Recorder, record

__all__ = ["Event", "Recorder", "record"]
