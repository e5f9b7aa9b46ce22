"""Serves vision-language models as a pipeline of Ray Serve deployments.

Each package lies in the folder of its name beside this one, which has a link to it: the code in `llm/` is
`raylens.llm`."""

__version__ = "0.1.0"
