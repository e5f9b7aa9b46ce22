"""What the language engine has to be told about each model family; `modeling.families` says which file has which."""
