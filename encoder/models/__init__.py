"""What the encoder has to know about each model family; `modeling.families` says which file describes which family."""
