"""What the language engine has to know about each model family; `modeling.families` says which file describes which."""
