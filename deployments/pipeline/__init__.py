"""The ingress' side of the stages: sends each request through them."""
