"""Which releases of other packages this client was run with: importing a module for another one warns."""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from importlib import metadata

RANGES = {
    "areal": ("1.0", "1.1"),
    "skyrl": ("0.3", "0.4"),
    "trl": ("1.16", "1.17"),
    "verl": ("0.9", "0.10"),
    "vllm": ("0.32", "0.34"),
}
"""By package: the first release that is supported, and the first after it that is not."""


class UnsupportedVersion(UserWarning):
    """A package is of a release that the client was not run with; it may work."""


@functools.cache
def check(package: str) -> None:
    """Warns, once in a process, if the package is installed and is outside its range."""
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        return
    first, end = RANGES[package]
    if not _release(first) <= _release(found) < _release(end):
        message = f"weightsync was run with {package} from {first} to before {end}, and finds {found}: see docs/integrations"
        warnings.warn(message, UnsupportedVersion, stacklevel=3)


class NotThere(RuntimeError):
    """A package lacks what this client works with: its release changed it."""


def needs(package: str, owner: object, name: str, instead: str) -> None:
    """Raises `NotThere` unless `owner` has the attribute `name`, or its constructor a parameter of that name where `owner` is a class."""
    if hasattr(owner, name) or (isinstance(owner, type) and _takes(owner, name)):
        return
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        found = "of an unknown release"
    kind = owner.__name__ if isinstance(owner, type) else type(owner).__name__
    raise NotThere(f"{package} {found} has no {name} at {kind}, which weightsync works with ({RANGES[package][0]} had it): {instead}")


def _takes(owner: type, name: str) -> bool:
    parameters = inspect.signature(owner).parameters.values()
    return any(parameter.name == name for parameter in parameters)


def _release(version: str) -> tuple[int, ...]:
    """The numbers at the beginning: (0, 33, 1) of 0.33.1.dev2+cpu."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()
