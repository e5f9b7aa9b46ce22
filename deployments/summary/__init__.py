"""What the metrics say of the last seconds, for people: `raylens top` and the page at `/dashboard` show it."""
