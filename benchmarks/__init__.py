"""Programs that measure; the last line that each prints is one JSON document. Nothing here is imported elsewhere."""

from deployments.stages.torch_setup import prepare_torch

# As replicas do, before anything imports torch or transformers.
prepare_torch()
