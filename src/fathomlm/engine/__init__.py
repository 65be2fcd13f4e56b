"""The engine: continuous depth-wise batching."""
