"""`python -m fathomlm.lab.evaluate ...`: lm-evaluation-harness' own command, with the model `fathomlm` known to it."""

from __future__ import annotations

from lm_eval.__main__ import cli_evaluate

import fathomlm.lab.evaluate.harness  # noqa: F401

if __name__ == "__main__":
    cli_evaluate()
