"""Messages and media in, token ids with placeholder ranges and per-item tensors out. CPU only.

A plain library: it knows nothing of Ray, HTTP servers or the stages behind it.
"""
