"""A stand-in for ``hccn_tool``, from which scripts for ``llm_datadist`` read device addresses.

Active only after ``install`` and only where the real tool is not installed. Device ``n`` has the
loopback address 127.0.0.(n + 1): different for each device, and this host answers at all of them.
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
from pathlib import Path

__all__ = ["install"]

_NAME = "hccn_tool"
_TEXT = """\
#!/bin/sh
# hccn_tool -i DEVICE -ip -g
if [ "$1" = -i ] && [ "$3 $4" = "-ip -g" ] && [ "$2" -ge 0 ] 2>/dev/null && [ "$2" -lt 254 ]; then
  echo "ipaddr:127.0.0.$(($2 + 1))"
  echo "netmask:255.0.0.0"
else
  echo "this stand-in for hccn_tool knows only: hccn_tool -i DEVICE -ip -g" >&2
  exit 1
fi
"""


def install() -> None:
    """Put the stand-in on the PATH of this process and its children, unless there is a tool."""
    if shutil.which(_NAME) is not None:
        return
    folder = tempfile.mkdtemp(prefix="llmdd-bin-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tool = Path(folder) / _NAME
    tool.write_text(_TEXT)
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    os.environ["PATH"] = os.pathsep.join(filter(None, [os.environ.get("PATH"), folder]))
