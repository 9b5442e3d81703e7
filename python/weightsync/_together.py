"""Steps that all ranks of a group do together: they continue only when all can, and fail with the same error.

Every rank sends a number; the largest number of all ranks counts. Nothing here waits longer than the group does.
"""

from __future__ import annotations

from collections.abc import Callable

from ._group import Group
from .errors import WeightSyncError, from_plain, to_plain

GO, WAIT, AGAIN, FAIL = range(4)
"""The number of a rank in an agreement; the largest of all ranks counts."""


def together(
    group: Group,
    step: Callable[[], int],
    as_error: Callable[[Exception], WeightSyncError],
    failure: Exception | None = None,
) -> int:
    """All ranks do a step, again as long as one says WAIT. Raises the error of the first rank that has one, on every rank."""
    while True:
        word = FAIL
        if failure is None:
            try:
                word = step()
            except Exception as raised:
                failure = raised
        agreed = group.most(word)
        if agreed == FAIL:
            raise _common(group, as_error(failure) if failure is not None else None)
        if agreed != WAIT:
            return agreed


def _common(group: Group, mine: WeightSyncError | None) -> WeightSyncError:
    """The error of the first rank that has one."""
    plain = group.gather(to_plain(mine) if mine is not None else None)
    rank, first = next((rank, error) for rank, error in enumerate(plain) if error is not None)
    return mine if mine is not None and rank == group.rank else from_plain(first)
