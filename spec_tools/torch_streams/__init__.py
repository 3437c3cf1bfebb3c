"""Searches for races in the FSDPs of torch on the simulated accelerator."""
