"""The language half of a model behind a paged engine: it takes token ids and item embeddings, and streams token ids,
which its detokenizer turns into text.

A plain, synchronous library: it knows nothing of Ray, asyncio or pixels.
"""
