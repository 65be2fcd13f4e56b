"""Texts judged by a language model behind an OpenAI-compatible endpoint (thesis 2.6.3, human-like evaluation)."""
