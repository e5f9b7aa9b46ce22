"""Views of a running server for people: `raylens top`, the figures of `/dashboard`, a request's waterfall."""
