"""What the encoder has to know about each model family; `modeling/families.py` says which file has which."""
