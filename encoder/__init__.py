"""The vision half of a model behind a batching engine: it takes item tensors and returns embeddings.

A plain, synchronous library: it knows nothing of Ray or asyncio.
"""
