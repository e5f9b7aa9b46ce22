"""`python -m raylens` is `raylens`."""

import sys

from raylens.deployments.cli import main

sys.exit(main())
