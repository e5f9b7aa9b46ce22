"""The spans of requests for OpenTelemetry: their creation and their export."""
