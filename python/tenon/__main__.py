"""`python -m tenon …` is the `tenon` command."""

import sys

from ._cli import main

sys.exit(main())
