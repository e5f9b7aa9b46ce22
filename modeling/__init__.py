"""Code that both halves of a model need: loading a part of a checkpoint, and other forms of linear layers."""
