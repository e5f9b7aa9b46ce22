"""PP-Chart2Table: its processor expands nothing, and the chat template writes all tokens of a picture."""

from functools import lru_cache, partial

from PIL import Image
from transformers import PreTrainedConfig

from raylens.modeling.found_model import FoundModel, find_model, placeholder_id
from raylens.preprocess.models.family import HFProcessor, ProcessorFamily
from raylens.preprocess.models.found import find_processor_family


@lru_cache(maxsize=8)
def _text_of_picture(found: FoundModel, processor: HFProcessor) -> str:
    """Returns as many placeholders as a picture has features, which the model computes without weights."""
    pixels = processor.image_processor(Image.new("RGB", (64, 64)), return_tensors="pt")["pixel_values"]
    owner = found.on_meta.get_submodule(found.features_path)
    features = owner.get_image_features(pixel_values=pixels.to("meta")).pooler_output
    token = str(processor.tokenizer.convert_ids_to_tokens(placeholder_id(found.on_meta.config)))
    return token * int(features.shape[:-1].numel())


def pp_chart2table(config: PreTrainedConfig) -> ProcessorFamily:
    return find_processor_family(config, partial(_text_of_picture, find_model(config)))
