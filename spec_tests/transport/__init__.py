"""Collectives, and the transport for gloo."""
