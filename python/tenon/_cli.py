"""The `tenon` command: runs the program that is installed with the library."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def command_path() -> Path:
    """The program of this package. TENON_COMMAND selects another one, e.g. of a build tree."""
    given = os.environ.get("TENON_COMMAND")
    return Path(given) if given else Path(__file__).parent / "bin" / "tenon"


def main() -> int:
    """Replaces this process with the program, with the same arguments."""
    path = command_path()
    if not os.access(path, os.X_OK) or path.is_dir():
        print(
            f"tenon: the program {path} is missing or may not be run; install the wheel "
            "tenon-kernels, or set TENON_COMMAND to the path of a built tenon command",
            file=sys.stderr,
        )
        return 1
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(path, ["tenon", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
