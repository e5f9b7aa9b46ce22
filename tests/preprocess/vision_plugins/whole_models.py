"""Small models with a vision half, and their parts saved as the weights of the plug-ins here are published."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import CLIPVisionModel, PreTrainedModel

from raylens.preprocess.hf_processor import load_processor
from raylens.preprocess.models.fixed_size import BLIP_2, LLAVA
from tests.small_models import make_checkpoint, whole_class


class WholeModel:
    """A small model with a vision half: `llava` or `blip-2`."""

    def __init__(self, model_type: str, folder: Path) -> None:
        self.checkpoint = make_checkpoint(model_type, folder)
        self.model: PreTrainedModel = whole_class(model_type).from_pretrained(self.checkpoint, dtype=torch.float32)
        self.model.eval()
        self.processor = load_processor(LLAVA if model_type == "llava" else BLIP_2, self.checkpoint, backend="pil")

    @torch.inference_mode()
    def features(self, image: Image.Image) -> torch.Tensor:
        """Returns the picture's embeddings, (num_embeds, hidden_size)."""
        pixels = self.processor.image_processor([image], return_tensors="pt")["pixel_values"]
        features: Any = self.model.get_image_features(pixel_values=pixels).pooler_output
        own: torch.Tensor = features[0]
        return own


def save_llava_parts(whole: WholeModel, folder: Path) -> dict[str, Any]:
    """Saves the parts of a LLaVA. Returns the plug-in's options."""
    parts: Any = whole.model.model
    tower = CLIPVisionModel(whole.model.config.vision_config)
    tower.load_state_dict(parts.vision_tower.state_dict())
    tower.save_pretrained(folder)
    whole.processor.image_processor.save_pretrained(folder)
    projector = parts.multi_modal_projector
    weights = {"0": projector.linear_1, "2": projector.linear_2}
    state = {f"model.mm_projector.{at}.{name}": one for at in weights for name, one in weights[at].state_dict().items()}
    torch.save(state, folder / "mm_projector.bin")
    return {"vision_model": str(folder), "projector": str(folder)}


def save_minigpt4_parts(whole: WholeModel, folder: Path) -> dict[str, Any]:
    """Saves the projector of a BLIP-2 as MiniGPT-4's. Returns the plug-in's options."""
    projector: Any = whole.model.language_projection
    file = folder / "pretrained_minigpt4.pth"
    torch.save({"model": {f"llama_proj.{name}": one for name, one in projector.state_dict().items()}}, file)
    return {"vision_model": whole.checkpoint, "projector": str(file)}


def squared(image: Image.Image) -> Image.Image:
    """Returns the picture in the middle of a square of CLIP's mean colour, as LLaVA 1.5 sees it."""
    side = max(image.size)
    square = Image.new("RGB", (side, side), (122, 116, 104))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square
