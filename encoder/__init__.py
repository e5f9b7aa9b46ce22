"""Item tensors in, embeddings out: the vision half of a model behind a batching engine.

A plain, synchronous library: it knows nothing of Ray or asyncio.
"""
