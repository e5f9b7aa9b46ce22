"""For every model family that takes videos: ids and tensors equal one call of the Hugging Face processor."""

import functools
import io
from collections.abc import Sequence
from typing import Any

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preprocess.field_layout import Outputs
from preprocess.media import VideoLimits
from preprocess.models import FAMILIES
from preprocess.schema import InvalidRequestError, ItemInfo, ItemTensors, TextPrompt, TokensPrompt
from preprocess.video import DecodedVideo, decode_video
from tests.preprocess.parity import EDGES, Pair, pair, picture
from tests.preprocess.small_processors import VIDEO_FAMILIES, Vocabulary, prompt_placeholder

CLIPS = ((24, 64, 48, 8), (7, 48, 96, 4), (60, 32, 32, 10))
"""(frames, width, height, frames a second) of the videos in turn."""

Item = tuple[ItemInfo, ItemTensors]


@functools.cache
def clip(index: int) -> bytes:
    """A square that moves and changes its shade, so that every frame is its own."""
    num_frames, width, height, fps = CLIPS[index]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(num_frames):
            pixels = np.full((height, width, 3), 30, np.uint8)
            start = number * 3 % (width - 16)
            pixels[8:24, start : start + 16] = (number * 9 % 256, 255 - number * 9 % 256, index * 80)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
        container.mux(stream.encode())
    return buffer.getvalue()


@functools.cache
def all_frames(index: int) -> DecodedVideo:
    return decode_video(clip(index), lambda metadata: range(metadata.total_num_frames), limits=VideoLimits())


def one_shot(families: Pair, text: str, clips: Sequence[int], pictures: Sequence[int]) -> dict[str, Any]:
    """Everything through Hugging Face's processor at once; it chooses of all frames where it has a setting for that."""
    part = families.theirs.video_processor
    does_sample = part.fps is not None or part.num_frames is not None
    metadata = []
    for index in clips:
        whole = vars(all_frames(index).metadata)
        metadata.append({**whole, "frames_indices": list(range(whole["total_num_frames"]))})
    return dict(
        families.theirs(
            text=text,
            images=[[picture(index) for index in pictures]] if pictures else None,
            videos=[all_frames(index).frames for index in clips],
            video_metadata=metadata,
            do_sample_frames=does_sample,
            return_tensors="pt",
        )
    )


def processed(families: Pair, clips: Sequence[int], pictures: Sequence[int] = ()) -> tuple[list[Item], list[Item]]:
    items = families.ours.items
    number = len(clips)
    return (
        [items.process("video", [clip(index)], num_in_prompt=number)[0] for index in clips],
        families.items(pictures) if pictures else [],
    )


@pytest.fixture(scope="module", params=sorted(VIDEO_FAMILIES))
def model_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def video_pair(model_type: str, vocabulary: Vocabulary) -> Pair:
    return pair(model_type, vocabulary, "torchvision")


def check(families: Pair, text: str, clips: Sequence[int], pictures: Sequence[int] = ()) -> None:
    expected = one_shot(families, text, clips, pictures)
    expected_ids = expected["input_ids"][0].tolist()
    videos, images = processed(families, clips, pictures)
    infos = [info for info, _ in [*images, *videos]]
    hashes = [str(index) for index, _ in enumerate(infos)]
    render = families.ours.prompts.render
    prompt = render(TextPrompt(text), infos, hashes)
    assert prompt.prompt_token_ids == expected_ids, families.difference(prompt.prompt_token_ids, expected_ids)
    assert render(TokensPrompt(families.theirs.tokenizer(text)["input_ids"]), infos, hashes) == prompt
    assert render(TokensPrompt(expected_ids), infos, hashes) == prompt, "expanded already"
    assert [placeholder.num_embeds for placeholder in prompt.placeholders] == [info.num_embeds for info in infos]
    merged = families.ours.items.unpack("video", [tensors for _, tensors in videos])
    check_tensors(families.model_type, merged, expected, bool(pictures))


def check_tensors(model_type: str, merged: Outputs, expected: dict[str, Any], has_pictures: bool) -> None:
    if model_type == "internvl":
        # It puts pictures and frames into one tensor, in the order of the prompt; here the videos' part of it.
        frames = merged["pixel_values_videos"].flatten(0, 1)
        found = expected["pixel_values"]
        starts = [0] if not has_pictures else range(len(found) - len(frames) + 1)
        assert any(torch.equal(found[start : start + len(frames)], frames) for start in starts)
        return
    for name, value in merged.items():
        assert torch.equal(value, torch.as_tensor(expected[name])), name


def placeholders(model_type: str) -> tuple[str, str]:
    return prompt_placeholder(model_type, "video"), prompt_placeholder(model_type)


@pytest.mark.parametrize("vocabulary", ["byte_level", "metaspace"])
@pytest.mark.parametrize("index", range(len(CLIPS)))
def test_one_video(model_type: str, vocabulary: Vocabulary, index: int) -> None:
    families = video_pair(model_type, vocabulary)
    if model_type in ("llava_onevision", "internvl") and CLIPS[index][0] > 32:
        pytest.skip("Hugging Face takes all frames, where nothing is set")
    video, _ = placeholders(model_type)
    check(families, f"Look: {video}\n what happens?", [index])


def test_two_videos(model_type: str) -> None:
    video, _ = placeholders(model_type)
    if FAMILIES[model_type].modalities["video"].max_items == 1:
        families = video_pair(model_type, "byte_level")
        infos = [info for info, _ in processed(families, [0, 1])[0]]
        with pytest.raises(InvalidRequestError, match="2 video items in one prompt, this model takes 1"):
            families.ours.prompts.render(TextPrompt(video * 2), infos, ["a", "b"])
        return
    # Hugging Face stacks the videos of these, or tells for each of them how many frames the longest has.
    second = 0 if model_type in ("llava_onevision", "internvl", "smolvlm") else 1
    check(video_pair(model_type, "byte_level"), f"One {video} and\n\n{video}two", [0, second])


@pytest.mark.parametrize("order", ["picture first", "video first"])
def test_videos_and_pictures_mixed(model_type: str, order: str) -> None:
    video, image = placeholders(model_type)
    text = f"a {image} b {video} c" if order == "picture first" else f"a {video} b {image} c"
    check(video_pair(model_type, "byte_level"), text, [0], [1])


@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_random_prompts(model_type: str, data: st.DataObject) -> None:
    before, after = data.draw(st.sampled_from(EDGES)), data.draw(st.sampled_from(EDGES))
    vocabulary: Vocabulary = data.draw(st.sampled_from(("byte_level", "metaspace")))
    video, _ = placeholders(model_type)
    check(video_pair(model_type, vocabulary), f"{before}{video}{after}", [data.draw(st.sampled_from((0, 1)))])


def test_the_number_of_embeddings_follows_from_the_size_alone(model_type: str) -> None:
    items = video_pair(model_type, "byte_level").ours.items
    for index, (_, width, height, _) in enumerate(CLIPS):
        info = items.process("video", [clip(index)])[0][0]
        num_frames = sampled_frames(model_type, index)
        counted = items.expansion_for_size("video", (num_frames, height, width))
        assert counted.features.num_embeds == info.num_embeds
    largest = items.expansion_for_size("video", items.largest_size("video")).features.num_embeds
    assert largest >= info.num_embeds


def sampled_frames(model_type: str, index: int, **options: Any) -> int:
    families = video_pair(model_type, "byte_level")
    rules = FAMILIES[model_type].modalities["video"]
    kwargs: dict[str, Any] = {}
    for name, value in options.items():
        kwargs |= rules.options[name](families.theirs, value)
    decoded = rules.decode(families.theirs, clip(index), families.ours.items._limits, kwargs)
    return len(decoded.frames)


def test_options_change_the_number_of_frames(model_type: str) -> None:
    assert sampled_frames(model_type, 2, num_frames=4) == 4
    fewer, more = (sampled_frames(model_type, 2, fps=fps) for fps in (1, 2))
    assert fewer < more
    items = video_pair(model_type, "byte_level").ours.items
    few, many = (items.process("video", [clip(2)], options={"num_frames": number})[0][0] for number in (4, 8))
    assert few.num_embeds < many.num_embeds


@pytest.mark.parametrize(
    "options", [{"fps": 0}, {"fps": 31}, {"fps": "2"}, {"num_frames": 769}, {"num_frames": 1.5}, {"fps": float("nan")}]
)
def test_options_out_of_bounds_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match=f"mm_processor_kwargs.{next(iter(options))}: must be"):
        video_pair("qwen2_vl", "byte_level").ours.items.process("video", [clip(1)], options=options)


@pytest.mark.parametrize("num_frames", [1, 2, 3])
def test_very_short_videos_work_or_are_refused(model_type: str, num_frames: int) -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for _ in range(num_frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8))))
        container.mux(stream.encode())
    items = video_pair(model_type, "byte_level").ours.items
    if num_frames == 1 and model_type.startswith("qwen"):
        with pytest.raises(InvalidRequestError):
            items.process("video", [buffer.getvalue()])
    else:
        assert items.process("video", [buffer.getvalue()])[0][0].num_embeds > 0


def test_what_is_no_video_is_refused(model_type: str) -> None:
    for content in (b"", b"no video", clip(0)[:500]):
        with pytest.raises(InvalidRequestError):
            video_pair(model_type, "byte_level").ours.items.process("video", [content])
