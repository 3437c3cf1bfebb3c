"""The order of all-gathers and reductions, prefetch, and the rate limiter."""
