"""Page numbers of one pool: which are free, and who holds the others.

A page has two kinds of holders. *Owners* are sequences that read it, and perhaps write its end, and cached prefixes that
sequences build on. *Keepers* are all cached prefixes. A page without owners is *spare*: nobody needs it now, and evicting
prefixes would free it. So it is known how many pages are `available` before anything is evicted.
"""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Hands out page numbers 0 to `total` - 1, the most recently freed first: its memory is likeliest to be warm.

    What a call costs does not depend on how large the pool is. Each takes many pages: a call for every page would take
    longer than what is done with it. Wrong calls are bugs of ours, and raise errors.
    """

    __slots__ = ("_free", "_keepers", "_owners", "_spare", "total")

    def __init__(self, pages: int) -> None:
        assert pages >= 1, f"a pool of {pages} pages"
        self.total = pages
        self._free = list(range(pages - 1, -1, -1))
        self._owners = [0] * pages
        self._keepers = [0] * pages
        self._spare = 0

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages that somebody holds, spare ones among them."""
        return self.total - len(self._free)

    @property
    def spare(self) -> int:
        """Pages that only the prefix cache holds, for nobody in particular."""
        return self._spare

    @property
    def available(self) -> int:
        """Pages that can be had without taking one from a sequence."""
        return len(self._free) + self._spare

    def owners(self, page: int) -> int:
        return self._owners[page]

    def keepers(self, page: int) -> int:
        return self._keepers[page]

    def allocate(self, count: int = 1) -> list[int]:
        """Free pages, each with one owner, the most recently freed first."""
        assert 0 < count <= len(self._free), f"{self.used} of all {self.total} pages of the pool are held"
        free, owners = self._free, self._owners
        pages = free[: -count - 1 : -1]
        del free[-count:]
        for page in pages:
            owners[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more owner of each of some pages that are held already."""
        owners, keepers = self._owners, self._keepers
        for page in pages:
            before = owners[page]
            if not before:
                assert keepers[page], f"page {page} is shared, but it is free"
                self._spare -= 1
            owners[page] = before + 1

    def release(self, pages: Iterable[int]) -> None:
        """One owner less of each."""
        owners, keepers, free = self._owners, self._keepers, self._free
        for page in pages:
            left = owners[page] - 1
            assert left >= 0, f"page {page} is released more often than it was allocated or shared"
            owners[page] = left
            if not left:
                if keepers[page]:
                    self._spare += 1
                else:
                    free.append(page)

    def keep(self, pages: Iterable[int]) -> None:
        """One more keeper of each of some pages that are held already."""
        owners, keepers = self._owners, self._keepers
        for page in pages:
            before = keepers[page]
            assert before or owners[page], f"page {page} is kept, but it is free"
            keepers[page] = before + 1

    def drop(self, pages: Iterable[int]) -> None:
        """One keeper less of each."""
        owners, keepers, free = self._owners, self._keepers, self._free
        for page in pages:
            left = keepers[page] - 1
            assert left >= 0, f"page {page} is dropped more often than it was kept"
            keepers[page] = left
            if not (left or owners[page]):
                self._spare -= 1
                free.append(page)
