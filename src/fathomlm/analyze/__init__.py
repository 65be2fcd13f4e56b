"""Looking at what was measured: curves of runs, and the numbers beside them."""
