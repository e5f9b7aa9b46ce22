"""Code for both halves of a model: loading a part of a checkpoint, and other forms of linear layers."""
