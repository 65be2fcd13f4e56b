"""Measuring the engine: workloads as plain data, a clock around what the host does, and records of what came out."""
