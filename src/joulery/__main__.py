"""``python -m joulery``."""

import sys

from joulery.ui.cli import main

sys.exit(main())
