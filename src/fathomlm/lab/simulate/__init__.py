"""Throughput without a device: the engine's own scheduler over exit trajectories and a table of times (thesis 3.5.5)."""
