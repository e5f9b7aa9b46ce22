"""LoRA adapters: reads them from a folder, and applies those in memory to the rows of a step."""
