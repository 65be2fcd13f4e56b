"""Weights in and out: Hugging Face, GGUF and our own format; tying and its initialisations; unrolled export."""
