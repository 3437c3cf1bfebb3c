"""The package's source and its records, read: modules in rows, notes, messages, breaks."""
