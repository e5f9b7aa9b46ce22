"""The spans of requests for OpenTelemetry: what is noted of them, who makes them, and where they go."""
