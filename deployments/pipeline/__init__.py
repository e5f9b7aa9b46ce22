"""How the ingress leads one request through the stages."""
