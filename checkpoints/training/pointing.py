"""Maps words of a question to cells of the grid, such as the cells of "circle" or "red circle", as a training hint.

Answers alone teach this slowly, because one word of answer says little about the cells that matter. Knows scenes and
token numbers, but no model."""

from collections.abc import Callable, Sequence

from raylens.checkpoints.training.questions import plural
from raylens.checkpoints.training.scenes import COLOURS, GRID, SHAPES, Scene

MAX_PICTURES = 3
CELLS = GRID * GRID
NO_PICTURE = -1
Encode = Callable[[str], tuple[int, ...]]


class Pointer:
    """Finds colour and shape words among tokens, if the word is a single token."""

    def __init__(self, encode: Encode) -> None:
        self._colours = {encode(f" {colour}"): colour for colour in COLOURS}
        self._kinds = {encode(f" {word}"): kind for kind in SHAPES for word in (kind, plural(kind))}

    def point(self, tokens: Sequence[int], scenes: Sequence[Scene]) -> list[tuple[int, list[int]]]:
        """Returns each such word's index and, for each cell of each picture, 1 if meant, 0 if not, -1 if absent."""
        pointed = []
        colour: str | None = None
        for index, token in enumerate(tokens):
            kind = self._kinds.get((token,))
            new_colour = self._colours.get((token,))
            if kind or new_colour:
                # "red circle": the second word means both if it follows directly.
                pointed.append((index, _meant(scenes, new_colour or colour, kind)))
            colour = new_colour
        return pointed


def _meant(scenes: Sequence[Scene], colour: str | None, kind: str | None) -> list[int]:
    cells = [0] * (CELLS * len(scenes)) + [NO_PICTURE] * (CELLS * (MAX_PICTURES - len(scenes)))
    for number, scene in enumerate(scenes):
        for shape in scene.shapes:
            if colour in (None, shape.colour) and kind in (None, shape.kind):
                cells[number * CELLS + shape.cell] = 1
    return cells
