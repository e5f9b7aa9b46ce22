"""What differs between model families in the language half, one file a `model_type`."""

from llm.models.family import LanguageFamily
from llm.models.llava import LLAVA

FAMILIES: dict[str, LanguageFamily] = {"llava": LLAVA}

__all__ = ["FAMILIES", "LanguageFamily"]
