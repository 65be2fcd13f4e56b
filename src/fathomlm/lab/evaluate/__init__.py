"""How good a model is: likelihood tasks, perplexity and generated texts, at every exit and every maximum depth."""
