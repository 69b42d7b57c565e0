"""Seeded simulation of the scheduler and the KV memory, without a model."""
