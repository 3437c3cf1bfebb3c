"""Tests of ``minifsdp_tools``: the calculator, ``explain`` and the timeline."""
