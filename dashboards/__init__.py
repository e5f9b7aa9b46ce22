"""The Grafana dashboard and what it is made from."""
