"""What a benchmark leaves: one JSON document, printed as its last line."""

import json
from pathlib import Path
from typing import Any


def publish(document: dict[str, Any], output: Path | None) -> None:
    """Prints the document, and writes it to the file `output` as well, if there is one."""
    if output is not None:
        output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))
