"""The wire types: what clients send and receive, as pydantic models. Nothing here calls a stage."""
