"""How far roundings move the distribution of the next token, for each family: mean KL divergence from float32.

    python -m benchmarks.next_tokens [--families NAME ...] [--output FILE]

The models are small, with random weights in bfloat16, and each computes prompts of 1000 random letters (or as many as
its context holds). Compared with transformers in float32: `transformers`, in bfloat16; `rounded`, which is Raylens as
it runs by default; `exact`, with `dtype: float32`; and the default with weights of 8 and 4 bits. Without AMX in the
processor, `rounded` is `exact`. The last line is one JSON document.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from benchmarks.document import make_parser, publish, this_machine
from raylens.llm.config import EngineConfig
from raylens.llm.model_runner import ModelRunner
from raylens.llm.quantization_loss import divergence, text_step
from raylens.preprocess.schema import ProcessedPrompt
from tests.checkpoint_copies import copy_in_dtype
from tests.llm.language_variants import VARIANTS
from tests.preprocess.parity import pair
from tests.small_models import VOCABULARY, whole_class

NUM_PROMPTS, NUM_TOKENS = 16, 1000
WAYS: dict[str, dict[str, Any]] = {
    "exact": {},
    "rounded": {"exact": False},
    "int8": {"exact": False, "quantization": "int8"},
    "int4": {"exact": False, "quantization": "int4"},
}


def takes_text(model_type: str) -> bool:
    """Whether a prompt of letters alone goes to the decoder."""
    return not pair(model_type, VOCABULARY, "auto").family.requires_items and model_type not in (
        "blip-2",
        "florence2",
        "wemm",
    )


def make_prompts(checkpoint: str, num_prompts: int, num_tokens: int) -> list[list[int]]:
    """Letters, as the tests' tokenizers number them."""
    limit = getattr(AutoConfig.from_pretrained(checkpoint).get_text_config(), "max_position_embeddings", num_tokens)
    size = (num_prompts, min(num_tokens, limit))
    return torch.randint(ord("a"), ord("z"), size, generator=torch.Generator().manual_seed(0)).tolist()


@torch.inference_mode()
def whole_logits(model: PreTrainedModel, prompts: list[list[int]]) -> torch.Tensor:
    return torch.cat([model(input_ids=torch.tensor([one])).logits[:, -1].float() for one in prompts])


@torch.inference_mode()
def our_logits(checkpoint: str, prompts: list[list[int]], **settings: Any) -> torch.Tensor:
    """Of one step for each whole prompt."""
    num_tokens = max(map(len, prompts))
    runner = ModelRunner(
        EngineConfig(checkpoint, kv_cache_bytes=2**26, max_num_batched_tokens=num_tokens, max_num_seqs=1, **settings)
    )
    logits = []
    for one in prompts:
        layout = runner.prompt_layout(ProcessedPrompt(one, [], []))
        step = text_step(runner._builder, one, layout, runner._config.block_size)
        logits.append(runner.run_step(step).logits[0].clone())  # its memory is used again
    return torch.stack(logits).flatten(0, -2)


def measure(name: str, folder: Path, num_prompts: int, num_tokens: int, ways: list[str]) -> dict[str, float]:
    """Returns the divergences of transformers in bfloat16 and of `ways` of Raylens."""
    variant = VARIANTS[name]
    for one in (folder / "float32", folder / "bfloat16"):
        one.mkdir()
    checkpoint = copy_in_dtype(variant.checkpoint(folder / "float32"), folder / "bfloat16", torch.bfloat16)
    prompts = make_prompts(checkpoint, num_prompts, num_tokens)
    whole = {
        dtype: whole_logits(whole_class(variant.model_type).from_pretrained(checkpoint, dtype=dtype).eval(), prompts)
        for dtype in (torch.float32, torch.bfloat16)
    }
    expected = whole[torch.float32]
    ours = {way: divergence(expected, our_logits(checkpoint, prompts, **WAYS[way])) for way in ways}
    return {"transformers": divergence(expected, whole[torch.bfloat16]), **ours}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--families", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    options = parser.parse_args()
    measured = {}
    for name in filter(lambda one: takes_text(VARIANTS[one].model_type), options.families):
        with tempfile.TemporaryDirectory() as folder:
            measured[name] = measure(name, Path(folder), NUM_PROMPTS, NUM_TOKENS, list(WAYS))
        print(f"{name:45}", *(f"{way} {value:.2e}" for way, value in measured[name].items()), flush=True)
    publish({"measured": measured, "machine": this_machine()}, options.output)


if __name__ == "__main__":
    main()
