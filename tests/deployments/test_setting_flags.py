"""Settings on the command line: what flags and `--set` mean, and what an unknown flag may have meant."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from raylens.deployments.launch.config_file import ConfigError, load_config
from raylens.deployments.launch.setting_flags import (
    FLAGS,
    add_arguments,
    flag_of,
    number,
    refuse_unknown,
    settings_of,
)


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def loaded(*arguments: str) -> Any:
    args = parsed(*arguments)
    return load_config(None, settings_of(args), flag_of=lambda setting: flag_of(setting, args))


@pytest.mark.parametrize(
    ("text", "meant"), [("12", 12), ("16k", 16_000), ("16K", 16_384), ("1m", 10**6), ("1.5G", 1_610_612_736)]
)
def test_numbers_are_readable(text: str, meant: int) -> None:
    assert number(text) == meant
    assert parsed("--max-model-len", text).max_model_len == meant


def test_any_setting_can_be_set(shapes: str) -> None:
    config = loaded(
        *("--model", shapes, "--max-num-seqs", "8", "--set", "generate.engine.block_size=8"),
        *("--set", "shared.embedding_cache_bytes=1G", "--set", "ingress.cors_origins=[https://a.example]"),
        *("--set", "encode.resources={encode_node: 1}", "--set", "generate.engine.prefix_caching=false"),
    )
    engine = config.generate.engine
    assert (engine.max_num_seqs, engine.block_size, engine.prefix_caching) == (8, 8, False)
    assert (config.shared.embedding_cache_bytes, config.encode.resources) == (2**30, {"encode_node": 1})
    assert config.ingress.cors_origins == ("https://a.example",)


def test_each_flag_is_a_setting(tmp_path: Path, shapes: str) -> None:
    of_adapters = {"enable_lora", "max_loras", "max_lora_rank"}  # which several ranks do not serve
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    values = {
        **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "max_model_len"), "32"),
        "tensor_parallel_size": "2",
        "model": shapes,
        "revision": "main",
        "served_model_name": "mine",
        "dtype": "float32",
        "gpu_memory_utilization": "0.5",
        "allowed_local_media_path": str(tmp_path),
        "chat_template": str(template),
        "tool_call_parser": "hermes",
        "reasoning_parser": "qwen3",
        "limit_mm_per_prompt": "image=4,video=0",
        "media_io_kwargs": '{"video": {"num_frames": 40}}',
    }
    without_value = {"trust_request_chat_template"}
    assert values.keys() | without_value == FLAGS.keys() - {"vision_plugin"} - of_adapters
    flags = [part for name, value in values.items() for part in (name, value)] + [*without_value]
    flags = [f"--{one.replace('_', '-')}" if one in FLAGS else one for one in flags]
    config = loaded(*flags)
    assert (config.generate.engine.memory_fraction, config.media.local_root) == (0.5, str(tmp_path))
    assert (config.media.limits.max_items_of, config.preprocess.video_frames) == ({"image": 4, "video": 0}, 40)
    assert config.chat.trust_request_template
    folder = ("--set", f"generate.adapters_folder={tmp_path}")
    engine = loaded("--max-loras", "3", "--max-lora-rank", "64", *folder).generate.engine
    assert (engine.max_loras, engine.max_lora_rank) == (3, 64)
    assert loaded("--enable-lora", *folder).generate.engine.max_loras == 1
    assert loaded("--limit-mm-per-prompt", '{"image": 2}').media.limits.max_items_of == {"image": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dtype", "float7"), r"--dtype: Input should be 'auto'"),
        (("--reasoning-parser", "x"), r"--reasoning-parser: .*must be one of"),
        (("--limit-mm-per-prompt", "picture=1"), r"max_items_of.*'image', 'video' or 'audio'"),
        (("--enable-lora",), r"adapters_folder is null"),
        (("--set", "generate.num_gpus=-1"), r"--set generate\.num_gpus: Input should be greater"),
        (("--set", "generate.engine.block_sise=8"), r"--set generate\.engine\.block_sise: Unexpected"),
        (("--set", "generate.num_gpu=1"), r"--set generate\.num_gpu: Extra inputs are not permitted"),
        (("--dtype", "auto", "--set", "dtype.x=1"), r"--set dtype.x: dtype is not a section of settings"),
    ],
)
def test_a_bad_setting_is_named_as_it_was_typed(shapes: str, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded("--model", shapes, *arguments)


@pytest.mark.parametrize("text", ["generate", "=5", "generate.num_gpus=[1"])
def test_what_is_no_assignment_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--set", text)
    assert "argument --set: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--limit-mm-per-prompt", "image"),
        ("--limit-mm-per-prompt", '{"image": {"count": 1}}'),
        ("--media-io-kwargs", '{"video": {"fps": 2}}'),
        ("--media-io-kwargs", "40"),
    ],
)
def test_values_of_another_form_are_refused(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(flag, value)
    assert f"argument {flag}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "meant"),
    [
        ("--prefix-cachin", "generate.engine.prefix_caching?"),
        ("--max-lora=2", "generate.engine.max_loras?"),
        ("--enable-prefix-caching", "generate.engine.prefix_caching?"),
        ("--cors-origin", "ingress.cors_origins?"),
    ],
)
def test_an_unknown_flag_is_told_the_setting_that_it_may_mean(argument: str, meant: str) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_unknown([argument, "more"])
    assert str(refused.value).startswith(f"there is no argument {argument}; `raylens serve` takes any setting")
    assert str(refused.value).endswith(f"--set NAME=VALUE: is it {meant}")


def test_what_is_like_no_setting_is_refused_without_a_guess() -> None:
    refuse_unknown([])
    for argument in ("--zzzzz", "zzzzz"):
        with pytest.raises(ConfigError, match=f"there is no argument {argument}") as refused:
            refuse_unknown([argument])
        assert "is it" not in str(refused.value)
