"""Published measurements of FSDP training in ``docs/data``, and the simulator's predictions for them."""
