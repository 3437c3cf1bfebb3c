"""Pages and parts of pages, made from the source, the records and the drawings."""
