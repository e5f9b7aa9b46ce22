"""From logits to token ids: penalties, truncation, sampling, log-probabilities, and structured output."""
