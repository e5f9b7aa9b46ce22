"""What a sequence keeps beside its tokens' keys and values: recurrent states and cross states, in slots and blocks."""
