"""What the hooks do when a package has changed what they work with."""

from __future__ import annotations

import pytest

from weightsync._supported import NotThere, needs


class Takes:
    """A trainer that takes another sender."""

    def __init__(self, model: str, *, weight_transfer: object = None) -> None:
        self.model, self.weight_transfer = model, weight_transfer


class TakesNone:
    """A trainer of a release that dropped the argument."""

    def __init__(self, model: str, **rest: object) -> None:
        self.model, self.rest = model, rest

    def sync_weights(self) -> None:
        """Moves weights by itself."""


def test_constructor_with_the_argument_is_taken() -> None:
    needs("trl", Takes, "weight_transfer", "use another")


def test_constructor_without_the_argument_is_refused_in_words() -> None:
    with pytest.raises(NotThere, match=r"^trl .* has no weight_transfer at TakesNone, .* \(1\.16 had it\): use another$"):
        needs("trl", TakesNone, "weight_transfer", "use another")


def test_object_is_asked_for_the_method() -> None:
    needs("trl", TakesNone("m"), "sync_weights", "use another")
    with pytest.raises(NotThere, match="has no _iter_named_params at TakesNone"):
        needs("trl", TakesNone("m"), "_iter_named_params", "use another")
