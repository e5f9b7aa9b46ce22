"""What a running server does, for people: `raylens top`, the figures of `/dashboard`, a request's waterfall."""
