"""Damage to files that a fuzzer tries: `python -m experiments.fuzz`."""
