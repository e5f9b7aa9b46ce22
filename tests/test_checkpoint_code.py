"""The code that a checkpoint brings never runs, not even where somebody at a terminal would say yes."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.preprocess.small_processors import save_processor

ROOT = Path(__file__).parent.parent
PRODUCTION = ("modeling", "preprocess", "encoder", "llm", "deployments", "planning")
LOADERS = ("from_pretrained", "from_config")
# These read plain settings and know of no code.
WITHOUT_CODE = ("GenerationConfig.from_pretrained", "loader.from_pretrained")

CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import PretrainedConfig, PreTrainedTokenizerFast
class OwnConfig(PretrainedConfig):
    model_type = "own"
class Own(PreTrainedTokenizerFast):
    pass
"""
AUTO_MAP = {
    "AutoConfig": "own_code.OwnConfig",
    "AutoModel": "own_code.Own",
    "AutoModelForCausalLM": "own_code.Own",
    "AutoProcessor": "own_code.Own",
    "AutoImageProcessor": "own_code.Own",
    "AutoVideoProcessor": "own_code.Own",
    "AutoTokenizer": ["own_code.Own", "own_code.Own"],
}
OWN_NAMES = {
    "tokenizer_class": "Own",
    "image_processor_type": "Own",
    "video_processor_type": "Own",
    "processor_class": "Own",
}
"""Of classes that transformers does not have, so that only the checkpoint's code would."""

SETUP = "import sys\nfrom raylens.modeling.torchvision_build import make_importable\nmake_importable()"
LOAD = """
from types import SimpleNamespace
from raylens.encoder.config import EncoderConfig
from raylens.encoder.loader import load_vision_half
from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.generation_defaults import load_generation_defaults
from raylens.modeling.model_configs import load_model_config
from raylens.preprocess.vision_plugins.llava import LlavaPlugin
from raylens.preprocess.vision_plugins.minigpt4 import MiniGPT4Plugin
from raylens.preprocess.models.vision_plugin import _Loader
from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig

PLUG_IN = SimpleNamespace(name=str, image_start=str, image_end=str, num_image_embeds=int)
PARTS = {"vision_device": "cpu", "projector_device": "cpu", "vision_bits": 32, "projector_bits": 32}

WAYS = {
    "configuration": load_model_config,
    "generation": lambda folder: load_generation_defaults(folder, None, None),
    "engine": lambda folder: LLMEngine(EngineConfig(folder, max_num_seqs=1, max_model_len=64)),
    "encoder": lambda folder: load_vision_half(EncoderConfig(folder)),
    "Pillow": lambda folder: MultiModalProcessor(ProcessorConfig(folder, image_backend="pil")),
    "torchvision": lambda folder: MultiModalProcessor(ProcessorConfig(folder, image_backend="torchvision")),
    "tokenizer": lambda folder: _Loader(PLUG_IN, {}).from_pretrained(folder),
    "LLaVA": lambda folder: LlavaPlugin("llava-v1.5", {"vision_model": folder, **PARTS}).load(),
    "MiniGPT-4": lambda folder: MiniGPT4Plugin({"vision_model": folder, **PARTS}).load(),
}
for folder in sys.argv[1:]:
    for name, load in WAYS.items():
        try:
            load(folder)
        except Exception as error:
            print(folder.rpartition("/")[2], name, type(error).__name__, error)
        else:
            print(folder.rpartition("/")[2], name, "loaded")
"""


def poison(folder: Path, marker: Path, **names: str) -> str:
    """Adds code that leaves a `marker`, and names it in every file of settings. `names`: what these are set to."""
    (folder / "own_code.py").write_text(CODE.format(marker=str(marker)))
    for file in ("config", "tokenizer_config", "processor_config", "preprocessor_config", "video_preprocessor_config"):
        path = folder / f"{file}.json"
        settings = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(settings | {"auto_map": AUTO_MAP} | names))
    return str(folder)


def at_a_terminal(code: str, *arguments: str) -> str:
    """What the code prints where each question on its terminal gets a yes."""
    ours, theirs = os.openpty()
    try:
        os.write(ours, b"y\n" * 100)
        env = {**os.environ, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, cwd=ROOT, env=env, stdin=theirs, capture_output=True, text=True, timeout=200)
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_way_of_loading_runs_a_checkpoints_code(shapes: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    known = poison(Path(shutil.copytree(shapes, tmp_path / "known")), marker)
    own = poison(Path(shutil.copytree(shapes, tmp_path / "own")), marker, **OWN_NAMES)
    model = poison(Path(shutil.copytree(shapes, tmp_path / "model")), marker, model_type="own")
    others = [
        poison(Path(save_processor(name, "byte_level", tmp_path / name)), marker, **OWN_NAMES)
        for name in ("qwen2_vl", "wemm")
    ]
    told = at_a_terminal(f"{SETUP}{LOAD}", known, own, model, *others)
    assert not marker.exists(), told
    assert "wish to run" not in told
    for way in ("configuration", "generation", "engine", "encoder", "Pillow", "torchvision", "tokenizer"):
        assert f"known {way} loaded" in told
    assert "own configuration loaded" in told


def test_yes_at_a_terminal_would_run_the_code(tmp_path: Path) -> None:
    """So the test above can fail."""
    folder = poison(Path(save_processor("llava", "byte_level", tmp_path / "own")), tmp_path / "ran", model_type="own")
    at_a_terminal("import sys; from transformers import AutoConfig; AutoConfig.from_pretrained(sys.argv[1])", folder)
    assert (tmp_path / "ran").exists()


def lacking(source: str) -> list[str]:
    """The calls of loaders in `source` that do not say that no code may run."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    found = []
    for call in calls:
        # `partial(loader, ...)` calls it, too.
        function = call.args[0] if ast.unparse(call.func) == "partial" else call.func
        says = [one.value for one in call.keywords if one.arg == "trust_remote_code"]
        is_safe = len(says) == 1 and isinstance(says[0], ast.Constant) and says[0].value is False
        if isinstance(function, ast.Attribute) and function.attr in LOADERS and not is_safe:
            found.append(ast.unparse(function))
    return found


@pytest.mark.parametrize("package", PRODUCTION)
def test_every_call_of_a_loader_says_that_no_code_may_run(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        assert set(lacking(path.read_text())) <= set(WITHOUT_CODE), path


def test_a_call_that_leaves_it_open_is_seen() -> None:
    assert lacking("AutoConfig.from_pretrained(model)\nAutoModel.from_config(c, trust_remote_code=True)") == [
        "AutoConfig.from_pretrained",
        "AutoModel.from_config",
    ]
