"""From logits to token ids: penalties, truncation, draws, log-probabilities, and answers of a given form."""
