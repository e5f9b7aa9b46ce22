"""What the encoder has to be told about each model family; `modeling.families` says which file has which."""
