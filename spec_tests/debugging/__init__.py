"""Tests of ``minifsdp.debug()``: for each check one healthy model and one with a fault on one rank."""
