"""The bundled model: its checkpoint (`shapes/`), pictures to ask it about (`pictures/`), and how it was trained."""

from pathlib import Path

BUNDLED_MODEL = Path(__file__).resolve().parent / "shapes"
PICTURES = Path(__file__).resolve().parent / "pictures"
