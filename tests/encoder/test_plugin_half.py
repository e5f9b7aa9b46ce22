"""A vision plug-in in the encoder: its memory is counted, and its first call may take long."""

import pytest
import torch

from raylens.encoder.config import EncoderConfig
from raylens.encoder.engine import EncoderEngine
from raylens.preprocess.schema import ItemTensors
from raylens.preprocess.vision_plugins.registry import VisionPluginChoice
from tests.preprocess.vision_plugins import plug_in
from tests.preprocess.vision_plugins.test_registry import PARAMS

NUM_BYTES = 2**20
PICTURE: ItemTensors = {"pixels": torch.zeros(8, 8, 3, dtype=torch.uint8)}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EncoderEngine:
    """Its plug-in takes a known amount of memory for each picture, and half a second for each call."""
    folder = tmp_path_factory.mktemp("plug-ins")
    costly = f"        time.sleep(0.5)\n        work = torch.ones(len(images), {NUM_BYTES}, dtype=torch.uint8)\n"
    method = "    def embed_images(self, images):\n"
    (folder / "blocks.py").write_text(plug_in.MODULE.replace(method, method + costly).replace(plug_in.NAME, "costly"))
    model = plug_in.make_text_model(tmp_path_factory.mktemp("llama"))
    choice = VisionPluginChoice("costly", str(folder), PARAMS)
    return EncoderEngine(EncoderConfig(model, vision_plugin=choice, plugin_timeout_s=0.1))


def test_memory_of_a_plug_in_bounds_batches(engine: EncoderEngine) -> None:
    num_pictures = 10
    engine.bound_activations("image", PICTURE, num_pictures * 2 * NUM_BYTES)
    # The plug-in's own tensors, and little beside them.
    assert num_pictures < engine.max_segment_patches["image"] / plug_in.NUM_EMBEDS <= 2 * num_pictures


@pytest.mark.long
def test_the_limit_of_time_holds_for_pictures_of_clients_only(engine: EncoderEngine) -> None:
    engine.bound_activations("image", PICTURE, NUM_BYTES)
    assert not engine.has_hung
    engine.max_segment_patches.clear()
    engine.add_request("slow", "image", PICTURE)
    (output,) = engine.step()
    assert "took more than 0.1 s for this picture" in str(output.error)
    assert engine.has_hung
