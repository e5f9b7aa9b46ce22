"""The training of the bundled model: scenes and their pictures, questions, training, and evaluation."""
