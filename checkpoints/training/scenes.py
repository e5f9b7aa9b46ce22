"""Pictures of coloured shapes on a 3x3 grid: their content and their drawing.

Knows nothing about questions, tokens or models. All randomness comes from the caller's `random.Random`, so that a seed
always gives the same picture."""

import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

RGB = tuple[int, int, int]
Point = tuple[float, float]

COLOURS: dict[str, RGB] = {
    "red": (214, 32, 38),
    "green": (34, 150, 62),
    "blue": (30, 82, 214),
    "yellow": (246, 212, 24),
    "purple": (128, 44, 160),
    "orange": (246, 132, 22),
    "black": (28, 28, 30),
    "pink": (250, 140, 186),
}
SHAPES = ("circle", "square", "triangle", "star", "diamond", "cross")
# Reading order: the place of row r and column c is PLACES[3 * r + c].
PLACES = (
    "top left",
    "top middle",
    "top right",
    "middle left",
    "centre",
    "middle right",
    "bottom left",
    "bottom middle",
    "bottom right",
)
GRID = 3
WITHOUT_PICTURE = 0.05  # the share of such rows
SEVERAL_PICTURES = 0.45  # the share of rows with two or three
MAX_SHAPES = {1: 4, 2: 2, 3: 2}  # in each picture of a row with that many pictures


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape: its name, its cell, and its exact drawing (lengths in cell widths)."""

    colour: str
    kind: str
    cell: int
    rgb: RGB
    radius: float
    shift: Point
    angle: float

    @property
    def place(self) -> str:
        return PLACES[self.cell]


@dataclass(frozen=True, slots=True)
class Scene:
    """The shapes of one picture in reading order, each in its own cell, on a light background."""

    shapes: tuple[Shape, ...]
    background: RGB


def random_scene(rng: random.Random, max_shapes: int) -> Scene:
    """Returns one to `max_shapes` shapes. Many repeat a colour or a kind, so that counting matters."""
    cells = sorted(rng.sample(range(GRID * GRID), rng.randint(1, max_shapes)))
    names = [(rng.choice(list(COLOURS)), rng.choice(SHAPES))]
    while len(names) < len(cells):
        colour, kind = rng.choice(names)
        fate = rng.random()
        if fate > 0.2:
            colour = rng.choice(list(COLOURS))
        if fate < 0.2 or fate > 0.4:
            kind = rng.choice(SHAPES)
        names.append((colour, kind))
    rng.shuffle(names)
    light = rng.randint(228, 252)
    background = (light + rng.randint(-8, 3), light + rng.randint(-8, 3), light + rng.randint(-8, 3))
    shapes = tuple(_random_shape(rng, *name, cell) for name, cell in zip(names, cells, strict=True))
    return Scene(shapes, background)


def random_scenes(rng: random.Random, several: float = SEVERAL_PICTURES) -> list[Scene]:
    """Returns up to three pictures that are asked about together. Some repeat a picture. `several`: the share with two
    or three."""
    shares = (WITHOUT_PICTURE, 1 - WITHOUT_PICTURE - several, several * 0.45, several * 0.55)
    count = rng.choices(range(len(shares)), shares)[0]
    scenes = [random_scene(rng, MAX_SHAPES[count]) for _ in range(count)]
    if count > 1 and rng.random() < 0.08:
        scenes[rng.randrange(count)] = rng.choice(scenes)
    return scenes


def _random_shape(rng: random.Random, colour: str, kind: str, cell: int) -> Shape:
    red, green, blue = (min(255, max(0, value + rng.randint(-12, 12))) for value in COLOURS[colour])
    radius = rng.uniform(0.30, 0.42)
    room = 0.48 - radius  # the shape never leaves its cell
    shift = (rng.uniform(-room, room), rng.uniform(-room, room))
    return Shape(colour, kind, cell, (red, green, blue), radius, shift, rng.uniform(-9, 9))


def render(scene: Scene, size: int) -> Image.Image:
    """Draws the scene as a square RGB picture of `size` pixels with smooth edges."""
    finer = 4 if size <= 128 else 2  # drawn larger, then averaged, because PIL has no anti-aliasing
    image = Image.new("RGB", (size * finer, size * finer), scene.background)
    draw = ImageDraw.Draw(image)
    cell_width = size * finer / GRID
    for shape in scene.shapes:
        row, column = divmod(shape.cell, GRID)
        x = (column + 0.5 + shape.shift[0]) * cell_width
        y = (row + 0.5 + shape.shift[1]) * cell_width
        radius = shape.radius * cell_width
        if shape.kind == "circle":
            reach = 0.9 * radius
            draw.ellipse((x - reach, y - reach, x + reach, y + reach), fill=shape.rgb)
            continue
        turn = math.radians(shape.angle)
        cos, sin = math.cos(turn) * radius, math.sin(turn) * radius
        corners = [(x + a * cos - b * sin, y + a * sin + b * cos) for a, b in _OUTLINES[shape.kind]]
        draw.polygon(corners, fill=shape.rgb)
    return image.reduce(finer)


def _around(count: int, radii: tuple[float, ...] = (1.0,)) -> list[Point]:
    """Returns corners evenly around the origin, the first one upwards, with alternating `radii`."""
    corners = []
    for i in range(count):
        turn = 2 * math.pi * i / count
        radius = radii[i % len(radii)]
        corners.append((radius * math.sin(turn), -radius * math.cos(turn)))
    return corners


_ARM, _TIP = 0.32, 0.95
_OUTLINES: dict[str, list[Point]] = {
    "square": [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)],
    "triangle": [(0.0, -0.95), (0.95, 0.75), (-0.95, 0.75)],
    "star": _around(10, (1.05, 0.42)),
    "diamond": [(0.0, -1.05), (0.72, 0.0), (0.0, 1.05), (-0.72, 0.0)],
    "cross": [
        *[(-_ARM, -_TIP), (_ARM, -_TIP), (_ARM, -_ARM), (_TIP, -_ARM), (_TIP, _ARM), (_ARM, _ARM)],
        *[(_ARM, _TIP), (-_ARM, _TIP), (-_ARM, _ARM), (-_TIP, _ARM), (-_TIP, -_ARM), (-_ARM, -_ARM)],
    ],
}
