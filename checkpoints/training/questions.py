"""Questions about scenes in a user's words, each with its only right answer.

Knows scenes but neither pixels nor tokens. A `QuestionDeck` holds all questions about some pictures, and draws from
them."""

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from raylens.checkpoints.training.scenes import COLOURS, PLACES, SHAPES, Scene, Shape

NUMBERS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ORDINALS = ("first", "second", "third")
ABOUT_ME = "I answer questions about pictures of coloured shapes."
NO_PICTURE = "I see no picture."

# {of} is " in the second image" for one of several pictures, and mostly "" for a single one.
PHRASINGS: dict[str, tuple[str, ...]] = {
    "colour": (
        "What colour is the {kind}{of}?",
        "What color is the {kind}{of}?",
        "Which colour does the {kind}{of} have?",
        "Which color is the {kind}{of}?",
    ),
    "shape": (
        "What shape is the {colour} one{of}?",
        "Which shape is {colour}{of}?",
        "What is the {colour} shape{of}?",
        "What is the shape of the {colour} one{of}?",
    ),
    "where": ("Where is the {colour} {kind}{of}?", "Where can you see the {colour} {kind}{of}?"),
    "where_kind": ("Where is the {kind}{of}?", "Where can you see the {kind}{of}?"),
    "place": (
        "What is in the {place}{of}?",
        "What do you see in the {place}{of}?",
        "What's in the {place}{of}?",
        "Which shape is in the {place}{of}?",
    ),
    "count": (
        "How many shapes are there{of}?",
        "How many shapes do you see{of}?",
        "How many shapes can you see{of}?",
        "Count the shapes{of}.",
    ),
    "count_kind": ("How many {kinds} are there{of}?", "How many {kinds} do you see{of}?"),
    "count_colour": ("How many {colour} shapes are there{of}?", "How many {colour} shapes do you see{of}?"),
    "exists": ("Is there a {colour} {kind}{of}?", "Do you see a {colour} {kind}{of}?"),
    "describe": (
        "Describe the picture.",
        "Describe the image.",
        "Describe this picture.",
        "What is in the picture?",
        "What is in the image?",
        "What do you see?",
        "What is in this picture?",
        "What is in this image?",
    ),
    "describe_one": (
        "What is in the {nth} {image}?",
        "Describe the {nth} {image}.",
        "What do you see in the {nth} {image}?",
        "What does the {nth} {image} show?",
    ),
    "which_image": (
        "Which {image} shows the {colour} {kind}?",
        "Which {image} has the {colour} {kind}?",
        "In which {image} is the {colour} {kind}?",
    ),
    "count_images": ("How many {image}s are there?", "How many {image}s do you see?"),
}
SINGLE_SUFFIXES = ("", "", "", " in the picture", " in the image")

SMALL_TALK: dict[str, tuple[str, ...]] = {
    ABOUT_ME: (
        *("Who are you?", "What are you?", "What can you do?", "What do you do?", "Help", "Can you help me?"),
        *("Tell me about yourself.", "How are you?", "What is your name?", "Tell me a story."),
        *("What is the capital of France?", "Write a poem.", "What is two plus two?", "Say something."),
        *("What is this?", "Translate this sentence into German.", "Explain how this works."),
        *("What time is it?", "Test"),
    ),
    "Hello! " + ABOUT_ME: ("Hello", "Hello!", "Hi", "Hi!", "Hello there", "Good morning", "Hey"),
    "You are welcome.": ("Thanks", "Thank you", "Thank you!", "Thanks!", "Thanks a lot."),
}


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its only right answer, and its kind, by which accuracy is counted."""

    text: str
    answer: str
    kind: str


@dataclass(frozen=True, slots=True)
class _Fact:
    """A question without its wording: the kind of phrasing and the words for its gaps."""

    kind: str
    answer: str
    gaps: dict[str, str]


class QuestionDeck:
    """All questions about these pictures by kind and answer, to draw from."""

    def __init__(self, scenes: Sequence[Scene]) -> None:
        self.has_picture = bool(scenes)
        self._by_kind: dict[str, dict[str, list[_Fact]]] = defaultdict(lambda: defaultdict(list))
        for fact in _facts(scenes):
            self._by_kind[fact.kind][fact.answer].append(fact)
        self.kinds = sorted(self._by_kind)

    def draw(self, rng: random.Random, weights: Mapping[str, float]) -> Question:
        """Draws a kind by its weight (default 1), then an answer, so that "none" and "no" do not dominate."""
        if not self.has_picture:
            return draw_small_talk(rng, with_picture=False)
        kind = rng.choices(self.kinds, [weights.get(kind, 1.0) for kind in self.kinds])[0]
        answers = self._by_kind[kind]
        return _put_into_words(rng.choice(answers[rng.choice(sorted(answers))]), rng)


def draw_small_talk(rng: random.Random, *, with_picture: bool) -> Question:
    """Returns a question that needs no picture, or (without a picture) one that would need it."""
    if not with_picture and rng.random() < 0.5:
        return Question(_without_picture(rng), NO_PICTURE, "no_picture")
    answer = rng.choice(list(SMALL_TALK))
    return Question(_vary(rng.choice(SMALL_TALK[answer]), rng), answer, "small_talk")


def describe(scene: Scene) -> str:
    """Returns all shapes in reading order: `a red circle in the top left, a blue square in the centre`."""
    return ", ".join(f"{_name(shape)} in the {shape.place}" for shape in scene.shapes)


def _facts(scenes: Sequence[Scene]) -> Iterator[_Fact]:
    if not scenes:
        return
    if len(scenes) == 1:
        yield from _facts_of_scene(scenes[0], None)
        yield _Fact("describe", describe(scenes[0]), {})
        return
    for number, scene in enumerate(scenes):
        yield from _facts_of_scene(scene, number)
        yield _Fact("describe_one", describe(scene), {"nth": ORDINALS[number]})
    yield _Fact("count_images", NUMBERS[len(scenes)], {})
    yield from _facts_which_image(scenes)


def _facts_of_scene(scene: Scene, number: int | None) -> Iterator[_Fact]:
    """Yields the facts of one picture. `number`: its position among several; None: the only one."""
    nth = {} if number is None else {"nth": ORDINALS[number]}
    shapes = scene.shapes
    for kind in SHAPES:
        same = [shape for shape in shapes if shape.kind == kind]
        yield _Fact("count_kind", NUMBERS[len(same)], {"kinds": plural(kind), **nth})
        if len(same) == 1:
            yield _Fact("colour", same[0].colour, {"kind": kind, **nth})
            yield _Fact("where_kind", f"in the {same[0].place}", {"kind": kind, **nth})
    for colour in COLOURS:
        same = [shape for shape in shapes if shape.colour == colour]
        yield _Fact("count_colour", NUMBERS[len(same)], {"colour": colour, **nth})
        if len(same) == 1:
            yield _Fact("shape", f"a {same[0].kind}", {"colour": colour, **nth})
    for colour in COLOURS:
        for kind in SHAPES:
            found = [shape for shape in shapes if shape.colour == colour and shape.kind == kind]
            gaps = {"colour": colour, "kind": kind, **nth}
            yield _Fact("exists", "yes" if found else "no", gaps)
            if len(found) == 1:
                yield _Fact("where", f"in the {found[0].place}", gaps)
    by_cell = {shape.cell: shape for shape in shapes}
    for cell, place in enumerate(PLACES):
        answer = _name(by_cell[cell]) if cell in by_cell else "nothing"
        yield _Fact("place", answer, {"place": place, **nth})
    yield _Fact("count", NUMBERS[len(shapes)], nth)


def _facts_which_image(scenes: Sequence[Scene]) -> Iterator[_Fact]:
    """Yields questions like `Which image shows the red circle?`, if exactly one picture has one."""
    homes: dict[tuple[str, str], set[int]] = defaultdict(set)
    for number, scene in enumerate(scenes):
        for shape in scene.shapes:
            homes[shape.colour, shape.kind].add(number)
    for (colour, kind), numbers in homes.items():
        if len(numbers) == 1:
            answer = f"the {ORDINALS[min(numbers)]} image"
            yield _Fact("which_image", answer, {"colour": colour, "kind": kind})


def _put_into_words(fact: _Fact, rng: random.Random) -> Question:
    image = rng.choice(("image", "image", "picture"))
    gaps = {"image": image, **fact.gaps}
    if "nth" in fact.gaps:
        word = "of" if fact.kind == "place" and rng.random() < 0.5 else "in"
        gaps["of"] = f" {word} the {fact.gaps['nth']} {image}"
    else:
        gaps["of"] = "" if fact.kind == "place" else rng.choice(SINGLE_SUFFIXES)
    text = rng.choice(PHRASINGS[fact.kind]).format(**gaps)
    return Question(_vary(text, rng), fact.answer, fact.kind)


def _without_picture(rng: random.Random) -> str:
    """Returns a question about a missing picture."""
    kind = rng.choice(list(PHRASINGS))
    gaps = {
        "kind": rng.choice(SHAPES),
        "kinds": plural(rng.choice(SHAPES)),
        "colour": rng.choice(list(COLOURS)),
        "place": rng.choice(PLACES),
        "nth": rng.choice(ORDINALS),
        "image": rng.choice(("image", "picture")),
        "of": rng.choice(("", "", f" in the {rng.choice(ORDINALS)} image", *SINGLE_SUFFIXES)),
    }
    return _vary(rng.choice(PHRASINGS[kind]).format(**gaps), rng)


def _vary(text: str, rng: random.Random) -> str:
    """Adds variations of real users: American spelling, no capital letter, no final punctuation."""
    text = text.replace("a orange", "an orange")
    if rng.random() < 0.3:
        text = text.replace("centre", "center")
    if rng.random() < 0.12:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.12:
        text = text.rstrip("?.!")
    return text


def plural(kind: str) -> str:
    return f"{kind}es" if kind.endswith("s") else f"{kind}s"


def _name(shape: Shape) -> str:
    return f"{'an' if shape.colour == 'orange' else 'a'} {shape.colour} {shape.kind}"
