"""A group that can be taken back, so that what hangs in it ends on all ranks: an error, instead of a wait for nobody.

A rank that has nothing under way in a group closes it by letting go of it; the others' calls fail, and they can let go
of it, too. (MPI has the like: revoking a communicator. Bland et al., IJHPCA 27(3), 2013.)
"""

from __future__ import annotations

from typing import Any

from shoal.errors import CollectiveError


class Revocable:
    """Holds `group` for all who use it; nobody else may."""

    def __init__(self, group: Any) -> None:
        self._groups = [group]

    @property
    def group(self) -> Any:
        """Raises `CollectiveError` where it was taken back."""
        if not self._groups:
            raise CollectiveError(
                "this group was closed because its ranks called different things: it cannot be used again; make the "
                "calls alike that the first error names"
            )
        return self._groups[0]

    def revoke(self) -> None:
        """May block until the other ranks have done so."""
        self._groups.clear()
