"""The order in which an item uses units: that of the item before, followed along and found again when it differs."""

from __future__ import annotations

Use = tuple[int, bool]  # a unit, and whether backward uses it


class UnitOrder:
    def __init__(self) -> None:
        self._known: list[Use] = []
        self._place = 0  # in it: of what comes next
        self._last: Use | None = None
        self._seen: list[Use] = []

    @property
    def following(self) -> int | None:
        """The unit that is used next, if all goes as it did before."""
        return self._known[self._place][0] if self._place < len(self._known) else None

    def after(self, unit: int, *, in_backward: bool, records: bool = True) -> int | None:
        """A unit is being used: what probably follows. An evaluation follows the order too, but is not recorded."""
        use = unit, in_backward
        if self._last == use:
            return self.following
        self._last = use
        if records:
            self._seen.append(use)
        try:
            self._place = self._known.index(use, self._place) + 1
        except ValueError:
            self._place = self._known.index(use) + 1 if use in self._known else len(self._known)
        return self.following

    def item_ended(self) -> None:
        self._known, self._seen, self._last, self._place = self._seen, [], None, 0
