"""`python -m deployments` is `raylens`."""

import sys

from deployments.cli import main

sys.exit(main())
