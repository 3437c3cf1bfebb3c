"""The engine with one wait, stream or copy removed at a time: does the simulated accelerator find each break?"""
