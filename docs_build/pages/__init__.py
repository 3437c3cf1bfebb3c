"""Pages and parts of pages, made from all of these."""
