"""How the ingress leads one request through the stages: its media, the caches, calls and their repetition."""
