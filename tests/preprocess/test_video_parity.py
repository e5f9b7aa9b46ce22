"""For every model family that takes videos: ids and tensors equal one call of the Hugging Face processor."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raylens.modeling.families import known_to, load_family
from raylens.preprocess.media import MediaLimits, VideoLimits
from raylens.preprocess.models.family import ProcessorFamily
from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig
from raylens.preprocess.schema import ChatPrompt, InvalidRequestError, ItemInfo, ItemTensors, TextPrompt
from raylens.preprocess.video import decode_video
from tests.preprocess.merged_items import merged_items
from tests.preprocess.parity import EDGES, Pair, in_prompt_order, pair
from tests.preprocess.small_processors import VIDEO_FAMILIES, Vocabulary, prompt_placeholder
from tests.preprocess.video_parity import CLIPS, Medium, clip, encoded_clip, has_setting, items_of, one_shot, prompt_of

STACKING = ("llava_onevision", "internvl", "smolvlm")
"""Hugging Face stacks the videos of these, or tells for each of them how many frames the longest has."""
TIMED = ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "molmo2")
"""Their prompts tell the time of frames."""
BOUNDED = ("qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm")
"""Their checkpoints say what the most frames are: 8."""


def check(families: Pair, texts: Sequence[str], media: Sequence[Medium], **options: Any) -> None:
    """Ids, positions and tensors are those of the one call, from a prompt as text, as ids and as expanded ids."""
    text = prompt_of(families.model_type, texts, media)
    exclusive = {name: options.get(name) for name in ("num_frames", "fps")} if options else {}
    expected = one_shot(families, text, media, **exclusive)
    expected_ids = expected["input_ids"][0].tolist()
    pictures, videos = items_of(families, media, "image"), items_of(families, media, "video", **options)
    infos: list[ItemInfo] = [info for info, _ in [*pictures, *videos]]
    prompt = families.render_text(text, infos)
    assert prompt.prompt_token_ids == expected_ids, families.difference(prompt.prompt_token_ids, expected_ids)
    families.check_placeholders(prompt, infos)
    assert [info.modality for info in in_prompt_order(prompt, infos)] == [modality for modality, _ in media]
    assert families.render_ids(families.theirs.tokenizer(text)["input_ids"], infos) == prompt
    assert families.render_ids(expected_ids, infos) == prompt, "expanded already"
    tensors = {"image": [own for _, own in pictures], "video": [own for _, own in videos]}
    check_tensors(families, media, tensors, expected)


def check_tensors(
    families: Pair, media: Sequence[Medium], tensors: dict[str, list[ItemTensors]], expected: dict[str, Any]
) -> None:
    merged: dict[str, dict[str, torch.Tensor]] = {
        name: dict(merged_items(families.ours.items, name, own)) for name, own in tensors.items() if own
    }
    if families.model_type == "internvl":
        # It puts pictures and frames into one tensor, in the order of the prompt.
        remaining = {name: iter(own) for name, own in tensors.items()}
        parts = [next(iter(next(remaining[modality]).values())) for modality, _ in media]
        assert torch.equal(expected["pixel_values"], torch.cat(parts))
        return
    if families.model_type == "smolvlm" and "image" in merged and "video" in merged:
        # The tensors of the pictures have the same names, and get lost.
        families.check_tensors(tensors["image"], one_shot_of_pictures(families, media))
        del merged["image"]
    found = {name: value for own in merged.values() for name, value in own.items()}
    of_text = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
    assert expected.keys() - of_text == found.keys()
    for name, value in found.items():
        assert torch.equal(value, torch.as_tensor(expected[name])), name


def one_shot_of_pictures(families: Pair, media: Sequence[Medium]) -> dict[str, Any]:
    pictures = [index for modality, index in media if modality == "image"]
    return families.one_shot(families.placeholder * len(pictures), pictures)


@pytest.fixture(scope="module", params=sorted(VIDEO_FAMILIES))
def model_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["byte_level", "metaspace"])
def families(model_type: str, request: pytest.FixtureRequest) -> Pair:
    return video_pair(model_type, request.param)


def video_pair(model_type: str, vocabulary: Vocabulary = "byte_level") -> Pair:
    return pair(model_type, vocabulary, "torchvision")


def takes_one(model_type: str) -> bool:
    family: ProcessorFamily = load_family("preprocess", model_type)
    return family.modalities["video"].max_items == 1


def test_every_checkpoint_with_a_video_processor_takes_videos() -> None:
    assert {
        name for name in known_to("preprocess") if "video" in load_family("preprocess", name).modalities
    } == VIDEO_FAMILIES


@pytest.mark.parametrize("index", range(len(CLIPS)))
def test_one_video(families: Pair, index: int) -> None:
    check(families, ["Look: ", "\n what happens?"], [("video", index)])


def test_two_videos(families: Pair) -> None:
    media = [("video", 0), ("video", 0 if families.model_type in STACKING else 1)]
    if not takes_one(families.model_type):
        check(families, ["One ", " and\n\n", "two"], media)
        return
    infos = [info for info, _ in items_of(families, media, "video")]
    with pytest.raises(InvalidRequestError, match="2 video items in one prompt, this model takes 1"):
        families.render_text(families.theirs.video_token * 2, infos)


@pytest.mark.parametrize("index", [0, 1, 3])
def test_videos_and_pictures_mixed(families: Pair, index: int) -> None:
    """The first picture is one tile to InternVL, which as tokens is a frame of a video."""
    media = [("video", 0), ("image", index)]
    for order in (media, media[::-1]):
        check(families, ["a ", " b ", " c"], order)
        check(families, ["", "", ""], order)


def test_a_video_between_pictures(families: Pair) -> None:
    check(families, ["a", "b", "c", "d"], [("image", 0), ("video", 1), ("image", 1)])


def test_the_pillow_back_end(model_type: str) -> None:
    if "pil" in load_family("preprocess", model_type).backends:
        check(pair(model_type, "byte_level", "pil"), ["a", "b", "c"], [("video", 1), ("image", 1)])


def test_frames_that_look_like_pictures() -> None:
    """A video of one frame and a picture of one tile are the same tokens; what stands before them tells."""
    families = video_pair("internvl")
    (image,) = families.items([0])
    video = families.ours.items.process("video", encoded_clip(1, 64, 48, 5))
    assert image[0].expansion.token_ids.tolist() == video[0].expansion.token_ids.tolist()
    for media in ([("video", 0), ("image", 0)], [("image", 0), ("video", 0)]):
        infos = [image[0], video[0]]
        prompt = families.render_text(prompt_of("internvl", ["a ", " b ", " c"], media), infos)
        assert [info.modality for info in in_prompt_order(prompt, infos)] == [modality for modality, _ in media]
        assert families.render_ids(prompt.prompt_token_ids, infos) == prompt


@pytest.mark.long
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_random_prompts(model_type: str, data: st.DataObject) -> None:
    vocabulary: Vocabulary = data.draw(st.sampled_from(("byte_level", "metaspace")))
    clips = st.just(data.draw(st.integers(0, 3))) if model_type in STACKING else st.integers(0, 3)
    videos = st.tuples(st.just("video"), clips)
    chosen = data.draw(st.lists(videos, min_size=1, max_size=1 if takes_one(model_type) else 2))
    chosen += data.draw(st.lists(st.tuples(st.just("image"), st.integers(0, 4)), max_size=2))
    media = data.draw(st.permutations(chosen))
    texts = data.draw(st.lists(st.sampled_from(EDGES), min_size=len(media) + 1, max_size=len(media) + 1))
    check(video_pair(model_type, vocabulary), texts, media)


def test_a_conversation_with_a_video(families: Pair) -> None:
    infos = [info for info, _ in items_of(families, [("video", 0)], "video")]
    content = [{"type": "video"}, {"type": "text", "text": "What happens?"}]
    prompt = families.ours.prompts.render(ChatPrompt([{"role": "user", "content": content}]), infos, ["a"])
    text = f"user: {prompt_placeholder(families.model_type, 'video')}What happens?\nassistant:"
    assert prompt.prompt_token_ids == one_shot(families, text, [("video", 0)])["input_ids"][0].tolist()


def test_metadata_is_not_changed() -> None:
    """Some processors set a frame rate where none is known."""
    families = video_pair("qwen3_vl")
    rules = families.family.modalities["video"]
    video = rules.blank((4, 64, 64))
    video.metadata.fps = None
    rules.run(families.theirs, video, families.ours.items._kwargs["video"])
    assert video.metadata.fps is None


def test_videos_of_different_lengths_are_padded_as_smolvlm_does() -> None:
    families = video_pair("smolvlm")
    media = [("video", 0), ("video", 1)]
    expected = one_shot(families, prompt_of("smolvlm", ["", "", ""], media), media)
    merged = merged_items(families.ours.items, "video", [tensors for _, tensors in items_of(families, media, "video")])
    for name in ("pixel_values", "pixel_attention_mask"):
        assert torch.equal(merged[name], expected[name])


# --- options


@pytest.mark.parametrize("options", [{"num_frames": 2}, {"num_frames": 5}, {"fps": 1}, {"fps": 2.5}])
def test_options_are_those_of_hugging_face(families: Pair, options: dict[str, Any]) -> None:
    """Of 24 frames in 3 seconds."""
    check(families, ["a ", " b"], [("video", 0)], **options)


def test_options_change_the_number_of_embeddings(model_type: str) -> None:
    process = video_pair(model_type).ours.items.process
    for few, many in (({"num_frames": 2}, {"num_frames": 8}), ({"fps": 0.5}, {"fps": 2})):
        less, more = (process("video", clip(2), options=options)[0].num_embeds for options in (few, many))
        assert less < more


def test_times_of_frames_round_as_in_hugging_face() -> None:
    """Molmo 2 reckons them as 32-bit numbers: 3 / 20 comes out as 0.2 and not as 0.1."""
    families = video_pair("molmo2")
    check(families, ["a ", " b"], [("video", 3)], fps=20)
    (info, _), *_ = items_of(families, [("video", 3)], "video", fps=20)
    assert "0.2<" in "".join(families.theirs.tokenizer.decode(info.expansion.token_ids.tolist()).split())


def test_frames_beyond_the_end_are_left_out() -> None:
    """13 steps of 15 / 13 end behind the last of 15 frames, by the last bit of a float."""
    families = video_pair("molmo2")
    with pytest.raises(IndexError):
        one_shot(families, families.theirs.video_token, [("video", 4)], fps=2.6, num_frames=None)
    ((info, _),) = items_of(families, [("video", 4)], "video", fps=2.6)
    assert info.num_embeds == families.ours.items.expansion_for_size("video", (13, 48, 48)).features.num_embeds


@pytest.mark.parametrize(
    "options",
    [
        *({"fps": value} for value in (0, -1, 31, "2", True, None, float("nan"), float("inf"))),
        *({"num_frames": value} for value in (0, 1, 9, 4.0, 1.5, "4", True, None)),
    ],
)
def test_options_out_of_bounds_are_refused(options: dict[str, object]) -> None:
    """Qwen2-VL takes at least the two frames that one token is of, and `max_frames` of its checkpoint."""
    with pytest.raises(InvalidRequestError, match=f"mm_processor_kwargs.{next(iter(options))}: must be"):
        video_pair("qwen2_vl").ours.items.process("video", clip(0), options=options)


def test_no_more_frames_than_any_limit_may_be_asked_for(model_type: str) -> None:
    most = 8 if model_type in BOUNDED else 768
    with pytest.raises(InvalidRequestError, match=f"num_frames: must be a whole number from [12] to {most}$"):
        video_pair(model_type).ours.items.process("video", clip(0), options={"num_frames": most + 1})


@pytest.mark.parametrize(("num_frames", "same"), [(4, {"num_frames": 4}), (8, {"fps": 2})])
def test_of_two_options_the_one_that_asks_for_fewer_frames_counts(
    model_type: str, num_frames: int, same: dict[str, Any]
) -> None:
    """Of 24 frames in 3 seconds."""
    process = video_pair(model_type).ours.items.process
    both = process("video", clip(0), options={"fps": 2, "num_frames": num_frames})
    check_equal(both, process("video", clip(0), options=same))


def check_equal(one: tuple[ItemInfo, ItemTensors], other: tuple[ItemInfo, ItemTensors]) -> None:
    assert one[0].expansion.token_ids.tolist() == other[0].expansion.token_ids.tolist()
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())


def test_the_number_of_frames_where_nobody_names_one(model_type: str) -> None:
    families = video_pair(model_type)
    config = ProcessorConfig(families.folder, image_backend="torchvision", video_frames=5)
    ours = MultiModalProcessor(config)
    item, usual = (one.items.process("video", clip(0)) for one in (ours, families.ours))
    if has_setting(families):
        check_equal(item, usual)
    else:
        assert item[0].num_embeds == ours.items.expansion_for_size("video", (5, 48, 64)).features.num_embeds
        assert item[0].num_embeds < usual[0].num_embeds
    assert ours.identity != MultiModalProcessor(replace(config, video_frames=6)).identity


# --- counting


@pytest.mark.parametrize("index", range(len(CLIPS)))
def test_the_number_of_embeddings_follows_from_the_size_alone(families: Pair, index: int) -> None:
    items = families.ours.items
    info, _ = items.process("video", clip(index))
    counted = items.expansion_for_size("video", (num_frames_of(families, index), *CLIPS[index][2:0:-1]))
    assert counted.features.num_embeds == info.num_embeds
    if families.model_type not in TIMED:
        assert counted.token_ids.tolist() == info.expansion.token_ids.tolist()
        assert (counted.features, counted.before, counted.after) == (
            info.expansion.features,
            info.expansion.before,
            info.expansion.after,
        )


def num_frames_of(families: Pair, index: int) -> int:
    items, rules = families.ours.items, families.family.modalities["video"]
    return len(rules.decode(families.theirs, clip(index), items._limits, items._kwargs["video"]).frames)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("max_video_tokens", [8, 20])
def test_the_limit_of_pixels_for_a_whole_video(
    model_type: str, max_video_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    families = video_pair(model_type)
    before = families.ours.items.expansion_for_size("video", (8, 300, 300)).features.num_embeds
    for processor in (families.ours.items._processor, families.theirs):
        monkeypatch.setattr(processor.video_processor, "cap_pixels_per_frame", True)
        monkeypatch.setattr(processor.video_processor, "max_video_tokens", max_video_tokens)
    check(families, ["a", "b"], [("video", 0)])
    assert families.ours.items.expansion_for_size("video", (8, 300, 300)).features.num_embeds != before
    check_sizes(families)


def check_sizes(families: Pair) -> None:
    """Counts of any size are those of frames of that size, and none is above that of the largest."""
    items, rules = families.ours.items, families.family.modalities["video"]
    largest = items.largest_size("video")
    most = items.expansion_for_size("video", largest).features.num_embeds
    numbers = sorted({1, 2, 3, 4, 5, 7, 8, min(8, largest[0])})
    for size in itertools.product(numbers, (8, 30, 45, 64, 100, 333), (30, 64, 220, 800)):
        counted = items.expansion_for_size("video", size).features.num_embeds
        assert counted <= most, size
        if size[0] % 4 == 1:
            outputs = rules.run(families.theirs, rules.blank(size), items._kwargs["video"])
            text = rules.expansion(families.theirs, outputs, {})
            assert text.count(rules.embed_token(families.theirs)) == counted, size


def test_no_video_takes_more_tokens_than_the_largest(model_type: str) -> None:
    check_sizes(video_pair(model_type))


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen3_vl"])
@pytest.mark.parametrize("cap_pixels_per_frame", [None, True])
@pytest.mark.parametrize("max_frames", [5, 40])
def test_the_largest_video_of_real_qwens(model_type: str, cap_pixels_per_frame: bool | None, max_frames: int) -> None:
    """Their limits let other shapes be the largest than those of the small checkpoints."""
    video_class = type(video_pair(model_type).theirs.video_processor)
    processor = SimpleNamespace(video_processor=video_class(cap_pixels_per_frame=cap_pixels_per_frame))
    rules = load_family("preprocess", model_type).modalities["video"]

    def num_tokens(*size: int) -> int:
        return int(rules.size_outputs(processor, *size, {})["video_grid_thw"].prod()) // 4

    (largest,) = rules.largest(processor, {"max_frames": max_frames})
    shapes = [(high, round(high * ratio)) for high in (20, 45, 90, 300, 640, 1100) for ratio in (1, 1.77, 8, 37, 100)]
    counts = [num_tokens(number, *shape) for number in range(2, max_frames + 1) for shape in shapes]
    assert 0.85 * num_tokens(*largest) <= max(counts) <= num_tokens(*largest)


def test_the_most_frames(model_type: str) -> None:
    num_frames, *_ = video_pair(model_type).ours.items.largest_size("video")
    # Of 8, the last two of Qwen's share their tokens.
    assert num_frames == (7 if model_type.startswith("qwen") else 8 if model_type in BOUNDED else 768)


def test_the_largest_video_is_as_long_as_the_limits_let_through(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = video_pair(model_type).ours.items
    monkeypatch.setattr(items, "_limits", MediaLimits(video=VideoLimits(max_frames=6)))
    info, tensors = items.largest_item("video")
    num_frames, *_ = items.largest_size("video")
    # Two of Qwen's share their tokens; Qwen3-VL has one limit of pixels for all frames, of which 5 leave least unused.
    assert num_frames == (5 if model_type.startswith("qwen") else 6)
    assert info.num_embeds == items.expansion_for_size("video", items.largest_size("video")).features.num_embeds
    assert info.num_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_times_are_not_rounded_to_the_encoders_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    families = video_pair("qwen2_5_vl")
    monkeypatch.setattr(families.ours.items, "_dtype", torch.bfloat16)
    _, tensors = families.ours.items.process("video", clip(3))
    assert tensors["pixel_values_videos"].dtype == torch.bfloat16
    expected = one_shot(families, families.theirs.video_token, [("video", 3)])["second_per_grid_ts"]
    assert torch.equal(tensors["second_per_grid_ts"], expected[0])
    assert tensors["second_per_grid_ts"] != tensors["second_per_grid_ts"].bfloat16()


# --- what is refused


@pytest.mark.parametrize("num_frames", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"fps": 5}])
def test_very_short_videos_work(model_type: str, num_frames: int, options: dict[str, Any]) -> None:
    items, content = video_pair(model_type).ours.items, encoded_clip(num_frames, 64, 48, 5)
    assert items.process("video", content, options=options)[0].num_embeds > 0


@pytest.mark.parametrize("file_format", ["mp4", "gif"])
def test_a_single_frame_is_repeated_to_fill_a_token(model_type: str, file_format: str) -> None:
    """As the Hugging Face processors do, but Qwen3-VL's, which refuses the frame alone."""
    families, content = video_pair(model_type), encoded_clip(1, 64, 48, 5, file_format=file_format)
    info, tensors = families.ours.items.process("video", content)
    video = decode_video(content, lambda metadata: [0], limits=VideoLimits())
    frames = torch.from_numpy(video.frames)
    expected = families.theirs(
        text=prompt_placeholder(model_type, "video"),
        videos=[frames.expand(2, -1, -1, -1) if model_type.startswith("qwen3_") else frames],
        video_metadata=[vars(video.metadata)],
        do_sample_frames=False,
        return_tensors="pt",
    )
    prompt = families.render_text(prompt_placeholder(model_type, "video"), [info])
    assert prompt.prompt_token_ids == expected["input_ids"][0].tolist()
    check_tensors(families, [("video", 0)], {"video": [tensors]}, dict(expected))


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "llava_onevision", "internvl"])
def test_a_video_of_fewer_frames_than_asked_for_keeps_all(model_type: str) -> None:
    """The Hugging Face processor refuses it."""
    items = video_pair(model_type).ours.items
    info, _ = items.process("video", clip(1), options={"num_frames": 8})
    assert info.num_embeds == items.expansion_for_size("video", (7, 96, 48)).features.num_embeds


def test_too_few_frames_a_second() -> None:
    with pytest.raises(InvalidRequestError, match="7 frames in 1.75 s, at 0.1 a second too few are left"):
        video_pair("internvl").ours.items.process("video", clip(1), options={"fps": 0.1})


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (MediaLimits(video=VideoLimits(max_frames=1)), "too_many_frames"),
        (MediaLimits(video=VideoLimits(max_frame_pixels=3000)), "video_too_large"),
        (MediaLimits(video=VideoLimits(max_total_pixels=6000)), "video_too_large"),
        (MediaLimits(video=VideoLimits(max_duration_s=2.9)), "video_too_long"),
    ],
)
def test_what_breaks_a_limit_is_refused(
    model_type: str, limits: MediaLimits, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = video_pair(model_type).ours.items
    monkeypatch.setattr(items, "_limits", limits)
    with pytest.raises(InvalidRequestError) as caught:
        items.process("video", clip(0), options={"fps": 2})
    assert (caught.value.field, caught.value.code) == ("media", code)


@pytest.mark.parametrize(
    ("bound", "value", "code"),
    [
        ("MAX_SOURCE_FRAMES", 23, "video_too_long"),
        ("MIN_SIDE", 49, "video_too_small"),
        ("MAX_ASPECT_RATIO", 1.3, "video_too_large"),
    ],
)
def test_what_breaks_a_fixed_bound_is_refused(
    model_type: str, bound: str, value: float, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = video_pair(model_type).ours.items
    monkeypatch.setattr(f"raylens.preprocess.media.{bound}", value)
    with pytest.raises(InvalidRequestError) as caught:
        items.process("video", clip(0), options={"fps": 2})
    assert (caught.value.field, caught.value.code) == ("media", code)


def test_what_is_no_video_is_refused(model_type: str) -> None:
    for content in (b"", b"no video", clip(0)[:500], clip(0)[:-100]):
        with pytest.raises(InvalidRequestError) as caught:
            video_pair(model_type).ours.items.process("video", content)
        assert caught.value.field == "media"


def test_without_torchvision_there_are_no_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    families = video_pair("qwen2_vl")
    monkeypatch.setattr(families.ours.items._processor, "video_processor", None)
    with pytest.raises(InvalidRequestError, match="this model takes image, not video"):
        families.ours.items.process("video", clip(0))
    assert families.ours.items.identity("a checkpoint")


def test_a_prompt_and_its_videos_must_match(families: Pair) -> None:
    infos = [info for info, _ in items_of(families, [("video", 0)], "video")]
    for text in ("a", prompt_of(families.model_type, ["a", "b"], [("image", 0)])):
        with pytest.raises(InvalidRequestError) as caught:
            families.ours.prompts.render(TextPrompt(text), infos, ["a"])
        assert caught.value.code == "placeholder_mismatch"
