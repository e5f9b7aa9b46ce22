"""The HTTP endpoint: the ingress deployment, its routes, admission, keys, errors, health, metrics and the web page."""
