"""LoRA adapters: reads them from a folder, keeps them in memory, and applies them to the sequences that ask."""
