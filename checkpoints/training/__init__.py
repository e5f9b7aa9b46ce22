"""How the bundled model was trained: scenes and their pictures, questions about them, the training and its judge."""
