"""What both halves of a model need: loading a part of a checkpoint, and the forms in which linear layers are kept."""
