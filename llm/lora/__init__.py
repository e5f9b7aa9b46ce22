"""LoRA adapters: read from a folder, held in memory, and added to the linear layers of the sequences that ask."""
