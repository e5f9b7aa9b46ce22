"""DeepSeek-VL: a picture is padded to a square and takes a fixed number of positions."""

from raylens.preprocess.models.family import FIXED_IMAGE, ProcessorFamily

DEEPSEEK_VL = ProcessorFamily(processor_class="DeepseekVLProcessor", modalities={"image": FIXED_IMAGE})
