"""`raylens batch`: a file of requests, sent to a running server, and a file of its answers."""
