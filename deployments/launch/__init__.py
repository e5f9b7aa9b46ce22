"""The command line: starts the application on this machine or sends it to a cluster, and waits until it is ready."""
