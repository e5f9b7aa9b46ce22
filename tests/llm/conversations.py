"""Conversations about videos and pictures: prompts and answers are those of transformers for a small checkpoint."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from raylens.preprocess.hasher import content_hash
from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig
from raylens.preprocess.schema import ItemInfo, TokensPrompt
from raylens.preprocess.video import DecodedVideo
from tests.pictures import encoded
from tests.preprocess.parity import picture
from tests.preprocess.video_parity import encoded_clip
from tests.small_models import Json, Request, greedy, item_features, make_checkpoint, whole_class

Inputs = dict[str, Any]
"""What the Hugging Face processor makes of a prompt."""

_WORDS = ("what", "does", "the", "red", "square", "do", "while", "it", "goes", "from", "left", "to", "right")
_MARKS = ("<|vision_start|>", "<|vision_end|>")
PLACEHOLDERS = {"video": "<|video_pad|>", "image": "<|image_pad|>"}


@dataclass(frozen=True)
class Medium:
    """A video or a picture, and the request's settings for it."""

    modality: str
    content: bytes
    options: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    """A medium as our processor knows it, and decoded."""

    info: ItemInfo
    hash: str
    decoded: Any


@dataclass(frozen=True)
class Turn:
    """A text with a placeholder for each of its media, in order."""

    text: str
    media: Sequence[Medium]


class Conversations:
    """A small checkpoint that takes videos of 300 frames."""

    def __init__(self, model_type: str, folder: Path) -> None:
        self.model_type = model_type
        length = {"max_position_embeddings": 2**15}
        self.checkpoint = make_checkpoint(model_type, folder, length, change=_with_long_videos)
        self._model: PreTrainedModel = whole_class(model_type).from_pretrained(self.checkpoint, dtype=torch.float32)
        self._model.eval()
        self._processor = MultiModalProcessor(ProcessorConfig(self.checkpoint, max_model_len=2**15))

    def requests(self, turns: Sequence[Turn]) -> list[Request]:
        """Returns each turn as a request that has all before it, answers included."""
        history: Inputs = {}
        items: list[Item] = []
        requests: list[Request] = []
        for turn in turns:
            own = [self._item(medium) for medium in turn.media]
            items += own
            history = _joined(history, self._inputs(turn.text, own))
            requests.append(self._request(history, items))
            history = _joined(history, self._text_inputs(requests[-1].expected))
        return requests

    def _request(self, inputs: Inputs, items: Sequence[Item]) -> Request:
        token_ids = inputs["input_ids"][0].tolist()
        prompt = self._processor.prompts.render(
            TokensPrompt(token_ids), [item.info for item in items], [item.hash for item in items]
        )
        assert prompt.prompt_token_ids == token_ids
        rows = {modality: iter(self._features(modality, inputs, items)) for modality in ("video", "image")}
        embeddings = [next(rows[item.info.modality]) for item in items]
        return Request(prompt, embeddings, *greedy(self._model, inputs))

    def _features(self, modality: str, inputs: Inputs, items: Sequence[Item]) -> Sequence[torch.Tensor]:
        sizes = [item.info.num_embeds for item in items if item.info.modality == modality]
        if not sizes:
            return []
        with torch.inference_mode():
            return torch.split(item_features(self._model, modality, inputs), sizes)

    def _item(self, medium: Medium) -> Item:
        items = self._processor.items
        rules, kwargs = items._chosen(medium.modality, medium.options)
        decoded = rules.decode(items._processor, medium.content, items._limits, kwargs)
        info, _ = items.process(medium.modality, medium.content, options=medium.options)
        return Item(info, content_hash(medium.content + json.dumps(medium.options).encode()), decoded)

    def _inputs(self, text: str, items: Sequence[Item]) -> Inputs:
        """A turn alone through the Hugging Face processor, with the frames that ours chooses."""
        clips = [item.decoded for item in items if item.info.modality == "video"]
        outputs = self._processor.items._processor(
            text=text,
            images=[item.decoded for item in items if item.info.modality == "image"] or None,
            videos=[self._frames(clip) for clip in clips] or None,
            video_metadata=[vars(clip.metadata) for clip in clips] or None,
            do_sample_frames=False,
            return_tensors="pt",
        )
        return dict(outputs)

    def _frames(self, clip: DecodedVideo) -> torch.Tensor:
        """Two of one for Qwen3-VL, which repeats a single frame only behind a check that refuses it."""
        is_alone = len(clip.frames) == 1 and self._model.config.model_type.startswith("qwen3_")
        return torch.from_numpy(clip.frames).expand(2 if is_alone else len(clip.frames), -1, -1, -1)

    def _text_inputs(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """An answer as the next prompt has it: without the placeholders that a model of random weights may say."""
        config = self._model.config
        own = [token for token in token_ids if token not in (config.image_token_id, config.video_token_id)]
        ids = torch.tensor([own], dtype=torch.int64)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": torch.zeros_like(ids)}


def _joined(history: Inputs, turn: Inputs) -> Inputs:
    def join(name: str) -> torch.Tensor:
        parts = [torch.as_tensor(one[name]) for one in (history, turn) if name in one]
        return torch.cat(parts, dim=1 if name in ("input_ids", "attention_mask", "mm_token_type_ids") else 0)

    return {name: join(name) for name in history | turn}


def _with_long_videos(folder: Path) -> None:
    """Every frame may be as small as one token, so that a long video's prompt stays short."""
    path = folder / "video_preprocessor_config.json"
    settings = json.loads(path.read_text())
    is_shared = settings["video_processor_type"] == "Qwen3VLVideoProcessor"
    least, most = (32**2, 300 * 6 * 32**2) if is_shared else (28**2, 6 * 28**2)
    settings |= {"size": {"shortest_edge": least, "longest_edge": most}, "max_frames": 768}
    path.write_text(json.dumps(settings))


def question(draw: random.Random) -> str:
    return " ".join(draw.choices(_WORDS, k=draw.randint(1, 40)))


def marked(modality: str) -> str:
    """An item's placeholder with the marks that chat templates write around it."""
    return PLACEHOLDERS[modality].join(_MARKS)


def random_clip(draw: random.Random) -> Medium:
    """1 to 300 frames that last up to a minute, of all of which the model gets some."""
    fps = draw.choice((1, 2, 5, 8, 24, 30))
    num_frames = draw.choice((draw.randint(1, 8), draw.randint(1, min(300, 60 * fps)), min(300, 60 * fps)))
    width, height = (draw.randrange(28, 132, 2) for _ in range(2))
    options: list[Json] = [{}, {"fps": draw.choice((0.2, 0.5, 1, 4, 8))}]
    if num_frames >= 2:
        options.append({"num_frames": draw.randrange(2, num_frames + 1, 2)})
    content = encoded_clip(num_frames, width, height, fps, tint=draw.randrange(256))
    return Medium("video", content, draw.choice(options))


def random_turn(draw: random.Random, *, least: int) -> Turn:
    """`least` to two media, most of them videos, and a text before, between and behind them."""
    media = [
        Medium("image", encoded(picture(draw.randrange(5)))) if draw.random() < 0.2 else random_clip(draw)
        for _ in range(draw.randint(least, 2))
    ]
    texts = [draw.choice(("", "Look: ", "and then ")) for _ in media]
    parts = [text + marked(one.modality) for text, one in zip(texts, media, strict=True)]
    return Turn("".join([*parts, question(draw)]), media)
