"""Raylens' own tiny checkpoint: the pictures, the questions, the training and the result (`shapes/`)."""
