"""The declarations of model families for the language engine; `modeling/families.py` maps families to files."""
