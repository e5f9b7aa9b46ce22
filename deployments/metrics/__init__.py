"""The metrics of the application's processes: definitions, the exporter of each node, and Prometheus' way to them."""
