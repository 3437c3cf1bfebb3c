"""The parts of the byte GPT tutorial. `tutorials/train_gpt.py` is the story, these are its footnotes.

=================  ==================================================================
`data`             the standard library as bytes, and every rank's own random windows
`model`            the GPT, one `Block` for each unit, and `generate`
`ranks`            starting the ranks, choosing their device, cleaning up
`options`          the command line
`report`           the progress bar, and who stores how many bytes
`counting`         what a step sends and gathers, seen from below every library
`recording`        the last steps as a trace and as a picture
`checkpoint`       a folder of checkpoints that is in order at every moment
`manifest`         what a checkpoint must consist of, and what is found instead
`doors`            how the state of a sharded model is asked for, and given back
`resume`           what a training consists of, written down and taken up again
`compare`          the same training by four contenders, in one table
=================  ==================================================================
"""

import warnings

# torch works without NumPy, and so does this program; one warning from each rank about it would be one too many.
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
