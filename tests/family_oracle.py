"""What transformers answers with a checkpoint of any family, for tests that ask the same over HTTP."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from raylens.modeling.families import load_family
from raylens.preprocess.hf_processor import load_processor
from tests.preprocess.video_parity import all_frames, whole
from tests.small_models import NUM_TOKENS, whole_class


class FamilyOracle:
    """The whole model, and its processor."""

    def __init__(self, model_type: str, checkpoint: str) -> None:
        self._processor = load_processor(load_family("preprocess", model_type), checkpoint, backend="torchvision")
        self._model = whole_class(model_type).from_pretrained(checkpoint, dtype=torch.float32).eval()

    def text_of(self, text: str, kinds: Sequence[str]) -> str:
        """The prompt of a conversation of items of these kinds and a text."""
        content = [{"type": kind} for kind in kinds] + [{"type": "text", "text": text}]
        messages = [{"role": "user", "content": content}]
        # Chameleon's processor has no chat template of its own.
        found: str = self._processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return found

    def expected(
        self, text: str, pictures: Sequence[Image.Image], videos: Sequence[int] = (), kinds: Sequence[str] | None = None
    ) -> tuple[list[int], list[int]]:
        """The ids of the prompt and of the answer, NUM_TOKENS of them. `videos`: by their index in `video_parity.clip`.
        `kinds`: the order of the items, else pictures come first."""
        prompt = self.text_of(text, kinds or ["image"] * len(pictures) + ["video"] * len(videos))
        clips: dict[str, Any] = {}
        if videos:
            frames = [torch.from_numpy(all_frames(index).frames) for index in videos]
            metadata = [whole(index) for index in videos]
            clips = {"videos": frames, "video_metadata": metadata, "do_sample_frames": True}
        inputs = self._processor(
            text=prompt, images=[list(pictures)] if pictures else None, return_tensors="pt", **clips
        )
        with torch.inference_mode():
            output = self._model.generate(
                **inputs, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
            )
        return inputs["input_ids"][0].tolist(), output[0, -NUM_TOKENS:].tolist()
