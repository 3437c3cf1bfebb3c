"""The parts of the byte GPT tutorial. `tutorials/train_gpt.py` is the main script, these modules have the details.

=================  ==================================================================
`data`             the standard library as bytes, and random windows that differ between ranks
`model`            the GPT, one `Block` for each unit, and `generate`
`ranks`            starting the ranks, choosing their device, cleaning up
`options`          the command line
`report`           the progress bar, and the number of bytes that each rank stores
`counting`         what a step sends and all-gathers, counted below every library
`recording`        the last steps as a trace and as a picture
`checkpoint`       a folder of checkpoints that is valid at every moment
`manifest`         the required contents of a checkpoint, and how they are checked
`doors`            getting and setting the state of a sharded model
`resume`           the state of a training, and how it is saved and restored
`compare`          the same training by six contenders, in one table
=================  ==================================================================
"""

import warnings

# torch works without NumPy, and so does this program; each rank would otherwise print a warning about it.
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
