"""The metrics of the application's processes: definitions, each node's exporter, and recording."""
