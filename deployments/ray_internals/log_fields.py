"""A log record's own fields in Ray Serve's JSON.

Ray 2.60: the formatter of Ray Serve's JSON log files adds the fields that a record has in one attribute.
Needed: the fields of the access log are in Ray's files, too.
Test: `tests/deployments/ray_internals/test_log_fields.py`.
Way back: a documented name. The constant is private, and importing it would import all of Ray Serve."""

ATTRIBUTE = "ray_serve_extra_fields"  # holds the fields: `extra={ATTRIBUTE: {...}}`
