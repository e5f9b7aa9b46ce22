"""Ray on this machine: its session, its processes and their environment, HAProxy, and what other users may reach."""
