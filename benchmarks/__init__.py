"""Programs that measure; the last line that each prints is one JSON document. Nothing here is imported elsewhere."""

import os

from deployments.stages.torch_setup import set_up_torch

# As replicas do, before anything imports transformers.
set_up_torch(os.cpu_count() or 1)
