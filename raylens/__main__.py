"""`python -m raylens` is `raylens`."""

import sys

from raylens.deployments.launch.cli import main

sys.exit(main())
