"""What Python's garbage collector walks while an engine runs.

Every request makes objects, so the collector runs again and again, and each full collection walks all that libraries and
models made when they were loaded: a sixth of the host's time for a token, where sequences are many (`fathomlm bench host`,
a mixture of recursions at 1,024 tokens a pass). Processes that are there to serve leave those objects out, as vLLM does.
Libraries that are imported into somebody's program do not: it is for the process to say.
"""

from __future__ import annotations

import gc

YOUNG = 20_000
"""New objects from one look at them to the next, in place of 700. A burst of many streams makes thousands of events, which
are gone by then; looked at in between they would cost a tenth of what the token does."""


def settle_heap() -> None:
    """What is there now is there to stay: collections no longer walk it."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])


def collect_heap() -> None:
    """Collect all that can be, also of what was there to stay: engines and models hold memory in cycles. Where collections
    leave anything out, they leave out what is there now."""
    settled = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if settled:
        gc.freeze()
