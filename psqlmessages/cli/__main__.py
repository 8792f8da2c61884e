"""python -m psqlmessages.cli: the console script."""

import sys

from psqlmessages.cli.main import main

sys.exit(main())
