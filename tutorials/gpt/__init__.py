"""Modules of the GPT tutorial. `tutorials/train_gpt.py` is the main script.

=================  ==================================================================
`data`             the standard library as bytes, and random windows that differ between ranks
`model`            the GPT with its `Block` class, and `generate`
`ranks`            starting the ranks, choosing their device, cleaning up
`options`          the command line
`report`           the progress bar, and the number of bytes that each rank stores
`counting`         counts the collectives of a step and the bytes that it sends, for every library
`recording`        the last steps as a trace and as a picture
`checkpoint`       a folder of checkpoints that stays valid if a process is killed
`manifest`         the required contents of a checkpoint, and how they are checked
`apis`             getting and setting the state of a sharded model
`resume`           the state of a training, and how it is saved and restored
`compare`          compares six ways to run the same training in one table
=================  ==================================================================
"""

import warnings

# torch and this program work without NumPy. Without this filter, each rank would print a warning.
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
