"""Data between stages: messages, tensors, and the private port that carries the pieces of answers."""
