"""The declarations of model families for the language engine; `modeling/families.py` says which file has which."""
