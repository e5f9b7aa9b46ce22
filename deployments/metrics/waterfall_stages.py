"""The stages of the waterfall; docs/metrics.md explains each."""

WATERFALL = (
    "admission_queue",
    "media_fetch",
    "processor_queue",
    "media_decode",
    "processor",
    "render",
    "transfer_pixels",
    "encode_queue",
    "encode",
    "transfer_embeddings",
    "llm_queue",
    "prefill",
    "first_decode",
)
"""In the order of a request's path."""
