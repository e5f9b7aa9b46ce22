"""The page that a browser gets while the endpoint is not there. It looks again every second.

This module imports nothing, so that `raylens-haproxy` starts within milliseconds."""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="refresh" content="1">
<title>{heading}</title>
<style>
:root {{ color-scheme: light dark; font: 16px/1.6 system-ui, sans-serif; }}
body {{ max-width: 34rem; margin: 12vh auto; padding: 0 1.25rem; background: light-dark(#f6f6f3, #121417);
  color: light-dark(#1b1f27, #e7e9ed); }}
table {{ border-collapse: collapse; margin: 1.25rem 0; }}
td {{ padding: .2rem 1.5rem .2rem 0; }}
small, td + td {{ color: light-dark(#5b6270, #9ba3b1); }}
.ready {{ color: light-dark(#14603b, #7fe0b0); }}
</style>
</head>
<body>
<h1>{heading}</h1>
{content}
</body>
</html>
"""


def waiting_page(heading: str, content: str) -> str:
    """`content`: markup, in which all foreign text is escaped."""
    return _PAGE.format(heading=heading, content=content)
