"""The declarations of model families for the encoder; `modeling/families.py` maps families to files."""
