"""Runs the language half of a model in a paged engine: from token ids and item embeddings to token ids, and by the
detokenizer to text. A plain, synchronous library: it knows nothing of Ray, asyncio or pixels."""
