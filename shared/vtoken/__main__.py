"""``python -m vtoken``: the same as ``vtoken``."""

import sys

from vtoken.cli import main

sys.exit(main())
