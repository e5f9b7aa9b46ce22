"""What the application's processes count and measure, how it is kept on each node, and how Prometheus reads it."""
