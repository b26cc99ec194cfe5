"""Is the engine correct, and how close is it to the hardware's limits? `python -m benchmarks`."""
