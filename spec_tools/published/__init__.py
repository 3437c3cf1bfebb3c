"""Published measurements of FSDP training, and the predictions of the step simulator for them.

Reading order: ``table`` (the measurements) -> ``setups`` (each of them as a configuration of the simulator) ->
``predictions`` (fit, prediction and file).
"""
