"""`raylens top`: what a server does, in a terminal."""
