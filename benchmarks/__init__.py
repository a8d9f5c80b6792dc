"""Benchmarks: what is fast, what is exact, with the bars that they have to pass. `python -m benchmarks.NAME`."""
