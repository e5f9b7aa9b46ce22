"""The bundled model: its checkpoint (`shapes/`), example pictures (`pictures/`), and its training (`training/`)."""

from pathlib import Path

BUNDLED_MODEL = Path(__file__).resolve().parent / "shapes"
PICTURES = Path(__file__).resolve().parent / "pictures"
