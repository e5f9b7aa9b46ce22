"""Turns messages and media into token ids with placeholder ranges, and into tensors for each item. CPU only.

It is a plain library: it knows nothing of Ray, HTTP servers or the stages behind it.
"""
