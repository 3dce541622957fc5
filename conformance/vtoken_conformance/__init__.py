"""The conformance suite: every executor against one brute-force model. Needs the extra ``conformance``."""

from vtoken.plugins import require_extra

require_extra(__name__, "conformance", "numpy", "rich")
