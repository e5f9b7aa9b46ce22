"""Token ids and item embeddings in, a stream of text out: the language half behind a paged engine.

A plain, synchronous library: it knows nothing of Ray, asyncio or pixels.
"""
