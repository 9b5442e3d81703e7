#!/usr/bin/env python3
"""Print kind's storage manifest, which lives in a Go source file as a string with constants put in between.

storage-manifest.py CONST_STORAGE_GO
"""

import re
import sys
from pathlib import Path

source = Path(sys.argv[1]).read_text()
constants = dict(re.findall(r'const (\w+) = "([^"]+)"', source))
start = source.index("defaultStorageManifest = `") + len("defaultStorageManifest = `")
text = source[start:]
for name, value in constants.items():
    text = text.replace(f"` + {name} + `", value)
print(text[: text.index("`")])
