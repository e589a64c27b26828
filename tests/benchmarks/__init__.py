"""Benchmarks: `python -m tests.benchmarks`. Never asserted: the machines that run the tests are noisy."""
