"""The pages of sequences: the quick question whether one lacks any, and what texts may share."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduling import build, read_all
from fathomlm.decode.sampling import Sampling
from fathomlm.engine.page_manager import PageManager
from fathomlm.engine.request import Request
from fathomlm.engine.sequence import Sequence


@settings(max_examples=400, deadline=None)
@given(
    new=st.integers(1, 20),
    pages=st.lists(st.integers(0, 5), min_size=2, max_size=2),
    entries=st.lists(st.integers(0, 9), min_size=2, max_size=2),
    read=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    more=st.integers(1, 9),
)
def test_short_says_whether_the_count_of_missing_pages_is_zero(
    new: int, pages: list[int], entries: list[int], read: tuple[int, int], more: int
) -> None:
    memory = PageManager(tables=(0, 1), pool_pages=(50, 50), page_size=3, prefix_caching=True)
    request = Request(id=1, prompt=(1, 2, 3, 4), sampling=Sampling(max_new_tokens=new))
    sequence = Sequence(request, entries=entries, prefilled=max(read), confirmed=min(read))
    sequence.pages = [list(range(count)) for count in pages]
    assert memory.short(sequence, more) == any(memory._missing(sequence, more))


def test_texts_of_another_kind_share_nothing() -> None:
    """Their tokens were run to another depth, so their entries differ."""
    scheduler = build()
    text = (1, 2, 3, 4, 5)
    for id, (kind, found) in enumerate([(0, 0), (2, 0), (1, 0), (2, 4), (0, 4)]):
        scheduler.submit(Sequence(Request(id=id, prompt=text, sampling=Sampling(max_new_tokens=1), max_depth=kind or None)))
        plan = scheduler.schedule()
        assert plan.placements[0].entries == (found,)
        read_all(scheduler, plan)
        scheduler.finish(id)
