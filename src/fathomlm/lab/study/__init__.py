"""Studies: many runs under one plan, a ledger of those that are finished, and what follows from them."""
