"""Reads the package's source and its records: modules in rows, notes, messages, breaks."""
