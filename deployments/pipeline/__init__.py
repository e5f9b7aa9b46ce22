"""How the ingress leads one request through the stages, and its part of what all ingresses share."""
