"""Prompts of models that no family declares: ids equal those of the Hugging Face processor, whatever stands beside a
picture."""

from pathlib import Path

import pytest
from PIL import Image

from raylens.modeling.families import family_of
from raylens.modeling.model_configs import load_model_config
from raylens.preprocess.hf_processor import load_processor
from raylens.preprocess.models.found import call_processor
from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig
from raylens.preprocess.schema import ChatPrompt, InvalidRequestError, TextPrompt, TokensPrompt
from tests.model_coverage.small_checkpoints import save_small_checkpoint
from tests.pictures import encoded

TEXTS = (
    "<image>word",
    "<image> a",
    "a<image>\nb",
    "<image><image>",
    "a <image><image>b<image>",
    "<image><b>",
    "<image>",
)


@pytest.mark.parametrize("splits", [False, True])
def test_idefics2_marks_pictures_as_its_processor_does(splits: bool, tmp_path: Path) -> None:
    save_small_checkpoint("idefics2", tmp_path)
    theirs = load_processor(family_of("preprocess", load_model_config(str(tmp_path))), str(tmp_path))
    theirs.image_processor.do_image_splitting = splits
    theirs.save_pretrained(tmp_path)
    ours = MultiModalProcessor(ProcessorConfig(str(tmp_path)))
    picture = Image.new("RGB", (60, 40), "red")
    info, _ = ours.items.process("image", encoded(picture))
    for text in TEXTS:
        number = text.count("<image>")
        expected = call_processor(theirs, text, [picture] * number)["input_ids"][0].tolist()
        for prompt in (TextPrompt(text), TokensPrompt(theirs.tokenizer(text)["input_ids"]), TokensPrompt(expected)):
            rendered = ours.prompts.render(prompt, [info] * number, ["picture"] * number)
            assert rendered.prompt_token_ids == expected, prompt
    typed = "<image> and <fake_token_around_image>word"
    chat = ChatPrompt([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": typed}]}])
    ids = ours.prompts.render(chat, [info], ["picture"]).prompt_token_ids
    assert ids.count(theirs.image_token_id) == info.num_embeds, "what a user types is ordinary text"
    assert typed in theirs.tokenizer.decode(ids)


def test_what_the_processor_puts_before_a_prompt_is_found(tmp_path: Path) -> None:
    """Emu3's tokenizer adds no BOS, its processor does."""
    save_small_checkpoint("emu3", tmp_path)
    theirs = load_processor(family_of("preprocess", load_model_config(str(tmp_path))), str(tmp_path))
    ours = MultiModalProcessor(ProcessorConfig(str(tmp_path)))
    picture = Image.new("RGB", (60, 40), "red")
    info, _ = ours.items.process("image", encoded(picture))
    for text, pictures in ((f"a {theirs.image_token} b", [picture]), ("a b", [])):
        infos, hashes = [info] * len(pictures), ["picture"] * len(pictures)
        expected = call_processor(theirs, text, pictures)["input_ids"][0].tolist()
        assert expected[0] == theirs.tokenizer.bos_token_id
        for prompt in (TextPrompt(text), TokensPrompt(theirs.tokenizer(text)["input_ids"]), TokensPrompt(expected)):
            assert ours.prompts.render(prompt, infos, hashes).prompt_token_ids == expected, prompt
    with pytest.raises(InvalidRequestError, match="2 image items in one prompt, this model takes 1"):
        ours.prompts.render(TextPrompt(theirs.image_token * 2), [info] * 2, ["picture"] * 2)


def test_a_template_that_writes_all_tokens_of_a_picture(tmp_path: Path) -> None:
    """PP-Chart2Table's processor expands nothing."""
    save_small_checkpoint("pp_chart2table", tmp_path)
    ours = MultiModalProcessor(ProcessorConfig(str(tmp_path)))
    info, _ = ours.items.process("image", encoded(Image.new("RGB", (60, 40), "red")))
    assert info.num_embeds == 256
    content = [{"type": "image"}, {"type": "text", "text": "a chart"}, {"type": "image"}]
    prompt = ours.prompts.render(ChatPrompt([{"role": "user", "content": content}]), [info] * 2, ["picture"] * 2)
    assert [(one.offset, one.num_embeds) for one in prompt.placeholders] == [(0, 256), (264, 256)]
    again = ours.prompts.render(TokensPrompt(prompt.prompt_token_ids), [info] * 2, ["picture"] * 2)
    assert again.prompt_token_ids == prompt.prompt_token_ids
