"""Turns messages and media into token ids with placeholder ranges, and into tensors for each item. CPU only.

A plain library: it knows nothing of Ray, HTTP servers or later stages."""
