"""Runs the vision half of a model in a batching engine: item tensors in, embeddings out.

A plain, synchronous library: it knows nothing of Ray or asyncio."""
