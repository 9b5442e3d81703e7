"""Prints the folder that holds `checkpoint_transfer`."""

from . import folder

print(folder())
