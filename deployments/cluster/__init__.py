"""Ray on this machine: its session, its processes and their environment, HAProxy, and the limits for other users."""
