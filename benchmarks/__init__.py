"""Is the engine right, and how far is it from what the hardware allows? `python -m benchmarks`."""
