"""Registers the engine of a pod, as the process that starts the engine does, until standard input ends."""

from __future__ import annotations

import sys

import weightsync

with weightsync.register_engine(int(sys.argv[1])):
    sys.stdin.read()
