"""The HTTP face: OpenAI's API over the engine's asyncio front, and what operators need beside it."""
