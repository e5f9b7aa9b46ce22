"""The wire: what clients send and what they get, as pydantic models; nothing in here calls a stage."""
