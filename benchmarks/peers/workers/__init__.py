"""One file a system, run by that system's own Python: `python -m benchmarks.peers.workers.llamacpp`."""
