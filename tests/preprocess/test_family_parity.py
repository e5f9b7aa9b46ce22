"""For every model family: ids and tensors equal one call of the Hugging Face processor with everything at once."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylens.modeling.families import known_to, load_family
from raylens.preprocess.hf_processor import ImageBackend
from raylens.preprocess.schema import ChatPrompt, InvalidRequestError
from tests.preprocess.parity import EDGES, Pair, pair, picture
from tests.preprocess.small_processors import Vocabulary

VOCABULARIES: tuple[Vocabulary, ...] = ("byte_level", "metaspace")
IMAGE_FAMILIES = [name for name in known_to("preprocess") if "image" in load_family("preprocess", name).modalities]
BACKENDS = [(name, backend) for name in IMAGE_FAMILIES for backend in load_family("preprocess", name).backends]


@pytest.fixture(scope="session", params=IMAGE_FAMILIES)
def model_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session", params=VOCABULARIES)
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def families(model_type: str, vocabulary: Vocabulary) -> Pair:
    return pair(model_type, vocabulary, load_family("preprocess", model_type).backends[0])


def max_items(model_type: str) -> int:
    return load_family("preprocess", model_type).modalities["image"].max_items or 3


@pytest.mark.parametrize("index", range(5))
def test_one_picture(families: Pair, index: int) -> None:
    text = families.prompt(["Look: ", " what is it?"])
    families.check(text, [index], families.items([index]))


def test_several_pictures_of_mixed_sizes(families: Pair, model_type: str) -> None:
    pictures = [3, 1, 2][: max_items(model_type)]
    text = families.prompt(["one\n", *["\n and "] * (len(pictures) - 1), "\n\n?"])
    families.check(text, pictures, families.items(pictures))


@pytest.mark.parametrize(("model_type", "backend"), BACKENDS)
def test_every_image_back_end(model_type: str, backend: ImageBackend) -> None:
    families = pair(model_type, "byte_level", backend)
    pictures = [0, 3][: max_items(model_type)]
    text = families.prompt(["a", *["b"] * (len(pictures) - 1), "c"])
    families.check(text, pictures, families.items(pictures))


@pytest.mark.long
def test_cached_and_new_pictures_in_every_order(model_type: str) -> None:
    families = pair(model_type, "byte_level", load_family("preprocess", model_type).backends[0])
    pictures = [0, 1, 2][: max_items(model_type)]
    in_cache = dict(zip(pictures, families.items(pictures), strict=True))
    for order in itertools.permutations(pictures):
        # Prompts of which all or none are cached are in `test_random_prompts`.
        for num_cached in range(1, len(order)) if len(order) > 1 else (0, 1):
            cached = {index: in_cache[index] for index in order[:num_cached]}
            new = [index for index in pictures if index not in cached]
            process = families.ours.items.process
            made = {index: process("image", families.contents(index), num_in_prompt=len(order)) for index in new}
            known = {**cached, **made}
            text = families.prompt(["a", *[" b "] * (len(order) - 1), "c"])
            families.check(text, order, [known[index] for index in order])


def test_conversations(families: Pair, model_type: str) -> None:
    """The chat template's text, tokenised as `apply_chat_template` of the processor does it."""
    if model_type == "florence2":
        pytest.skip("a task has to be the whole prompt")
    pictures = [2, 0][: max_items(model_type)]
    first, *later = [{"type": "image"}] * len(pictures)
    messages = [
        {"role": "user", "content": [first, {"type": "text", "text": "What\nis it?\n"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A dog."}]},
        {"role": "user", "content": [{"type": "text", "text": "And this: "}, *later]},
    ]
    tokenizer = families.theirs.tokenizer
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    starts_with_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    options = {"add_special_tokens": False} if starts_with_bos else {}
    images = [picture(index) for index in pictures]
    outputs = families.theirs(text=text, images=[images], return_tensors="pt", **options)
    expected = families.as_rendered(outputs["input_ids"][0].tolist())
    infos = [info for info, _ in families.items(pictures)]
    prompt = families.ours.prompts.render(ChatPrompt(messages), infos, ["h"] * len(infos))
    assert prompt.prompt_token_ids == expected, families.difference(prompt.prompt_token_ids, expected)


@pytest.mark.parametrize(
    "text", ["Just a question, no picture.\n", "a</s>b <s> c", "<s>x", " <pad> y", "x</s>", "<|im_end|>a<|im_start|>\n"]
)
def test_text_alone(families: Pair, text: str) -> None:
    """Special tokens in it are those of the model, as Hugging Face's processor reads them."""
    if not families.family.requires_items:
        families.check(families.prompt([text]), [], [])
        return
    with pytest.raises(ValueError, match="`images` are expected"):
        families.one_shot(text, [])
    with pytest.raises(InvalidRequestError, match=r"takes no text alone, send media \(image\)"):
        families.render_text(text, [])


@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_random_prompts(model_type: str, vocabulary: Vocabulary, data: st.DataObject) -> None:
    families = pair(model_type, vocabulary, load_family("preprocess", model_type).backends[0])
    pictures = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=max_items(model_type)))
    texts = data.draw(st.lists(st.sampled_from(EDGES), min_size=len(pictures) + 1, max_size=len(pictures) + 1))
    items = families.cached_items(pictures) if data.draw(st.booleans()) else families.items(pictures)
    families.check(families.prompt(texts), pictures, items)


def test_the_number_of_tokens_follows_from_the_size_alone(model_type: str) -> None:
    families = pair(model_type, "byte_level", load_family("preprocess", model_type).backends[0])
    for num_in_prompt in range(1, max_items(model_type) + 1):
        for index in range(5):
            content = families.contents(index)
            info, _ = families.ours.items.process("image", content, num_in_prompt=num_in_prompt)
            width, height = picture(index).size
            counted = families.ours.items.expansion_for_size("image", (height, width), num_in_prompt=num_in_prompt)
            assert counted.token_ids.tolist() == info.expansion.token_ids.tolist()
            assert (counted.features, counted.before, counted.after) == (
                info.expansion.features,
                info.expansion.before,
                info.expansion.after,
            )


def test_no_picture_takes_more_tokens_than_the_largest(families: Pair) -> None:
    items = families.ours.items
    most = items.expansion_for_size("image", items.largest_size("image")).features.num_embeds
    for height, width in itertools.product((8, 28, 56, 100, 112, 200, 333, 1000), repeat=2):
        if max(height, width) <= 20 * min(height, width):
            assert items.expansion_for_size("image", (height, width)).features.num_embeds <= most, (height, width)
