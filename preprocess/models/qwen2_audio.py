"""Qwen2-Audio, which only hears."""

from raylens.preprocess.models.family import ProcessorFamily, audio_token
from raylens.preprocess.models.found import sound_modality

QWEN2_AUDIO = ProcessorFamily(
    processor_class="Qwen2AudioProcessor",
    modalities={"audio": sound_modality(audio_token, ("input_features", "feature_attention_mask"))},
    backends=("torchvision",),
)
