"""Streams and memory on an accelerator: required waits, and operations that must not wait for each other."""
