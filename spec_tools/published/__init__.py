"""Published measurements of training with FSDP, as data with checks."""
