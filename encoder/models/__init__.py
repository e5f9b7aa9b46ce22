"""The declarations of model families for the encoder; `modeling/families.py` says which file has which."""
