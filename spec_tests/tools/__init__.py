"""Tests of ``minifsdp.tools``: the calculator, ``explain`` and the timeline."""
