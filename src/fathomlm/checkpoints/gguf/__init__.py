"""GGUF files as base checkpoints: the reader, the metadata's architecture, the tokenizer inside."""

from fathomlm.checkpoints.gguf.checkpoint import GGUFCheckpoint

__all__ = ["GGUFCheckpoint"]
