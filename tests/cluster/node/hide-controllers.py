#!/usr/bin/env python3
"""Patch the entrypoint of kind's node image: on a machine with cgroup v1, hide the controllers that nobody has mounted.

hide-controllers.py ENTRYPOINT
"""

import sys
from pathlib import Path

CALL = "    remove_misc_controller\n    # kubelet will try"
HIDE = """\
    remove_misc_controller
    awk 'NR == 1 || $2 != 0' /proc/cgroups >/kind/fake-cgroups && mount --bind /kind/fake-cgroups /proc/cgroups
    # kubelet will try"""

entrypoint = Path(sys.argv[1])
text = entrypoint.read_text()
if text.count(CALL) != 1:
    sys.exit(f"{entrypoint} is not the entrypoint that this patch was made for")
entrypoint.write_text(text.replace(CALL, HIDE))
