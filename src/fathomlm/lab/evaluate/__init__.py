"""How good a model is: likelihood tasks, perplexity and generation, at every exit and every maximum depth."""
