"""Looking at what was measured: curves of runs, and what happens inside a model, as numbers, pictures and pages."""
