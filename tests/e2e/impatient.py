"""``python -m tests.e2e.impatient``: services leave slices empty after 3 s of low demand, not after 30 s."""

import functools
import sys

from joulery.app.serving import service
from joulery.policies.consolidation import Consolidation
from joulery.ui.cli import main

if __name__ == "__main__":
    service.Consolidation = functools.partial(Consolidation, patience_s=3.0)  # type: ignore[misc,assignment]
    sys.exit(main())
