"""The Ray Serve application: the three libraries as deployments, the HTTP endpoint and the command line.

The only package that imports Ray, FastAPI and Prometheus metrics; nothing imports it but tests and benchmarks.
"""
