"""Decoding, slow and obviously right: what every faster way must agree with, token for token."""
