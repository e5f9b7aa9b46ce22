"""The Ray Serve application: the three libraries as deployments, the HTTP endpoint and the command line.

Only this package imports Ray, FastAPI and Prometheus metrics; only tests and benchmarks import it."""
