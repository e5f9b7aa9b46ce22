"""Layers whose tokens see chosen positions only, or weigh positions by their distance."""
