"""Text in, batches out: sources are tokenised once into a corpus on disk, which loaders read in a reproducible order."""
