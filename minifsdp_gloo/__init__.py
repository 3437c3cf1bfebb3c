"""A transport between CPUs: all-gather and reduce-scatter by messages of gloo, instead of gloo's own collectives.

``minifsdp/__init__.py`` attaches `transport_between` to the engine, which does not know this package. This package does
not import minifsdp.
"""

from minifsdp_gloo.transport import transport_between

__all__ = ["transport_between"]
