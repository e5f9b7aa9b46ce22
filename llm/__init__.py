"""Runs the language half of a model in a paged engine. The engine takes token ids and item embeddings and streams token
ids. The detokenizer turns these into text.

A plain, synchronous library: it knows nothing of Ray, asyncio or pixels.
"""
