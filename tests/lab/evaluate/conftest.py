"""Lets the tests of this folder import `evaluate_models` beside them. They cannot say `evaluate.evaluate_models`, as other
folders would: `evaluate` is also a package that lm-eval needs, so this folder must not become one of that name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
