"""Page numbers of one pool: which are free, and who holds the others.

A page has two kinds of holders. *Owners* are sequences that read it, and perhaps write its end, and cached prefixes that
sequences build on. *Keepers* are all cached prefixes. A page without owners is *spare*: nobody needs it now, and evicting
prefixes would free it. So it is known how many pages are `available` before anything is evicted.
"""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Hands out page numbers 0 to `total` - 1, the most recently freed first: its memory is likeliest to be warm.

    Every call costs the same, however large the pool is. Wrong calls are bugs of ours and raise AssertionError.
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
        return self._owners[self._known(page)]

    def keepers(self, page: int) -> int:
        return self._keepers[self._known(page)]

    def allocate(self, count: int = 1) -> list[int]:
        """Free pages, each with one owner, the most recently freed first."""
        assert 0 < count <= len(self._free), f"{self.used} of all {self.total} pages of the pool are held"
        pages = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for page in pages:
            self._owners[page] = 1
        return pages

    def share(self, page: int) -> None:
        """One more owner of a page that is held already."""
        assert self._held(page), f"page {page} is shared, but it is free"
        self._spare -= not self._owners[page]
        self._owners[page] += 1

    def release(self, page: int) -> None:
        """One owner less."""
        self._known(page)
        self.release_all((page,))

    def release_all(self, pages: Iterable[int]) -> None:
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

    def keep(self, page: int) -> None:
        """One more keeper of a page that is held already."""
        assert self._held(page), f"page {page} is kept, but it is free"
        self._keepers[page] += 1

    def drop(self, page: int) -> None:
        """One keeper less."""
        assert self.keepers(page), f"page {page} is dropped more often than it was kept"
        self._keepers[page] -= 1
        if not self._keepers[page] and not self._owners[page]:
            self._spare -= 1
            self._free.append(page)

    def _held(self, page: int) -> bool:
        return self.owners(page) > 0 or self.keepers(page) > 0

    def _known(self, page: int) -> int:
        assert 0 <= page < self.total, f"page {page} is not one of the pool's {self.total}"
        return page
