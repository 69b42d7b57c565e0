"""Octavo beside its peers, in turn in one run. `python -m benchmarks.compare` writes benchmarks/RESULTS.md."""
