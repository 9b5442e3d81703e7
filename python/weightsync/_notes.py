"""Says once what the replicas note about a version: tensors that lose precision, or names that were compared with nothing."""

from __future__ import annotations

import logging
import re

from .result import Result

_LOG = logging.getLogger("weightsync")
_SAID: set[str] = set()
_MOST = 256


def warn_once(result: Result) -> None:
    """One line for each new note; one that differs only in its numbers is not new."""
    for replica, notes in result.notes.items():
        for note in notes:
            key = re.sub(r"\d+", "#", note)
            if key not in _SAID and len(_SAID) < _MOST:
                _SAID.add(key)
                _LOG.warning("version %d at %s: %s", result.version, replica, note)
