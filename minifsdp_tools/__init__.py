"""Cost calculator, `explain`, and drawings: the cost of a job, and the events of a run."""
