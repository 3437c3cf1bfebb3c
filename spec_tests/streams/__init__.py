"""Streams and memory on an accelerator: what must wait for what, and what may not wait."""
