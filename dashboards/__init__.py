"""The Grafana dashboard, Prometheus' rules, and their generator."""
