"""Measuring, as part of the product: kernels beside the hardware's limits, latency of a batch, throughput of many."""
