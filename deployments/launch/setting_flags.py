"""Settings on the command line of `raylens serve`: flags for the usual ones, and `--set` for every one."""

import argparse
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from raylens.deployments.config import AppConfig
from raylens.deployments.launch.config_file import ConfigError

FLAGS: Mapping[str, str] = {
    "model": "model",
    "revision": "revision",
    "served_model_name": "served_model_name",
    "max_model_len": "max_model_len",
    "dtype": "dtype",
    "vision_plugin": "vision_plugin.name",
    "tensor_parallel_size": "generate.tensor_parallel_size",
    "gpu_memory_utilization": "generate.engine.memory_fraction",
    "max_num_seqs": "generate.engine.max_num_seqs",
    "max_num_batched_tokens": "generate.engine.max_num_batched_tokens",
    "allowed_local_media_path": "media.local_root",
    "limit_mm_per_prompt": "media.limits.max_items_of",
    "media_io_kwargs": "preprocess.video_frames",
    "max_loras": "generate.engine.max_loras",
    "enable_lora": "generate.engine.max_loras",
    "max_lora_rank": "generate.engine.max_lora_rank",
    "chat_template": "chat.template",
    "tool_call_parser": "chat.tool_call_parser",
    "reasoning_parser": "chat.reasoning_parser",
    "trust_request_chat_template": "chat.trust_request_template",
}
"""The setting that each flag changes. Flags have vLLM's names where vLLM has one."""

_READABLE = re.compile(r"(\d+(?:\.\d+)?)([kmgt])", re.IGNORECASE)
_EXPONENTS = {"k": 1, "m": 2, "g": 3, "t": 4}


def add_arguments(serve: argparse.ArgumentParser) -> None:
    add: Any = serve.add_argument
    add("--model", help="the same for one model")
    add("--revision", metavar="NAME", help="branch, tag or commit of a hub id")
    add("--served-model-name", metavar="NAME", help="name of the model in the API (default: the last part of MODEL)")
    add(
        "--max-model-len", type=number, metavar="N", help="tokens of prompt and answer (default: the model's own limit)"
    )
    add(
        "--dtype",
        help="auto (bfloat16 on a GPU; on the CPU float32, or with AMX the file's own), float32, bfloat16 or float16",
    )
    add("--vision-plugin", metavar="NAME", help="vision plug-in for a text model; auto: the one for the model's name")
    add("--tensor-parallel-size", type=int, metavar="N", help="divide the language model among N ranks (default: 1)")
    add("--gpu-memory-utilization", type=float, metavar="SHARE", help="of a GPU's memory, for decoding (default: 0.9)")
    add("--max-num-seqs", type=number, metavar="N", help="answers computed at a time (default: by the memory)")
    add("--max-num-batched-tokens", type=number, metavar="N", help="tokens of a step (default: by the device)")
    add("--allowed-local-media-path", metavar="FOLDER", help="folder whose files requests may name (default: none)")
    limit_help = "media items of a request, e.g. image=4,video=1, or as JSON (default: 16 in all)"
    add("--limit-mm-per-prompt", type=_limits, metavar="LIMITS", help=limit_help)
    io_help = """frames of a video, as '{"video": {"num_frames": 64}}' (default: 32)"""
    add("--media-io-kwargs", type=_video_frames, metavar="JSON", help=io_help)
    lora_help = "serve LoRA adapters, one at a time; --set generate.adapters_folder=DIR names their folder"
    add("--enable-lora", action="store_const", const=1, help=lora_help)
    add("--max-loras", type=int, metavar="N", help="the same for N adapters in memory at a time")
    add("--max-lora-rank", type=int, metavar="N", help="highest rank of an adapter (default: 16)")
    add("--chat-template", metavar="FILE", help="Jinja chat template (default: the model's)")
    add("--tool-call-parser", metavar="NAME", help="format of tool calls (default: found by the chat template)")
    add("--reasoning-parser", metavar="NAME", help="tags of thoughts (default: found by the chat template)")
    trust_help = "let requests bring a chat template"
    add("--trust-request-chat-template", action="store_const", const=True, help=trust_help)
    set_help = "any setting of serve.yaml, repeatable, e.g. --set generate.num_gpus=1; VALUE: YAML, or 16k, 1m, 2G"
    add("--set", action="append", default=[], type=_assignment, metavar="NAME=VALUE", help=set_help)


def number(text: str) -> int:
    """Returns the number that a text such as `32768`, `32k` or `1.5M` names. As in vLLM, k, m, g and t are powers of
    1000, and K, M, G and T powers of 1024. Raises ValueError."""
    if (found := _READABLE.fullmatch(text)) is None:
        return int(text)
    base = 1000 if found[2].islower() else 1024
    factor: int = base ** _EXPONENTS[found[2].lower()]
    return round(float(found[1]) * factor)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings of the flags, by dotted names, and of `--set`, which goes before."""
    own: dict[str, Any] = {}
    for name, setting in FLAGS.items():  # of two flags for one setting the first
        if getattr(args, name) is not None:
            own.setdefault(setting, getattr(args, name))
    return own | dict(args.set)


def flag_of(setting: str, args: argparse.Namespace) -> str:
    """Returns the flag that has set a setting."""
    if setting in dict(args.set):
        return f"--set {setting}"
    names = (name for name, one in FLAGS.items() if one == setting and getattr(args, name) is not None)
    return "--" + next(names).replace("_", "-")


def refuse_unknown(arguments: list[str]) -> None:
    """Raises ConfigError for arguments that no command takes, with the setting that each may mean."""
    if not arguments:
        return
    wanted = arguments[0].partition("=")[0].lstrip("-").replace("-", "_")
    message = f"there is no argument {arguments[0]}"
    if arguments[0].startswith("-"):
        names = {name.rpartition(".")[2]: name for name in _names(AppConfig)}
        meant = "".join(f" {names[one]}" for one in difflib.get_close_matches(wanted, names, n=1))
        message += "; `raylens serve` takes any setting of serve.yaml as --set NAME=VALUE"
        message += f": is it{meant}?" if meant else ""
    raise ConfigError(message)


def _limits(text: str) -> dict[str, int]:
    """Returns the limits of vLLM's `--limit-mm-per-prompt`, in its old or its new form."""
    try:
        given = json.loads(text) if text.startswith("{") else dict(one.split("=") for one in text.split(","))
        return {name: int(limit) for name, limit in given.items()}
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not like image=4,video=1") from error


def _video_frames(text: str) -> int:
    try:
        match json.loads(text):
            case {"video": {"num_frames": int(number), **others}} if not others:
                return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} sets more or less than the num_frames of video")


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, number(value) if _READABLE.fullmatch(value) else yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{name}: {value!r} is not YAML") from error


def _names(model: Any, before: str = "") -> Iterator[str]:
    """Yields the dotted names of all settings of one model and of the server."""
    if not is_dataclass(model):
        own = {name: field.annotation for name, field in model.model_fields.items()}
    else:
        own = {field.name: field.type for field in fields(model)}
    for name, kind in own.items():
        sections = [one for one in (kind, *get_args(kind)) if _is_section(one)]
        if name == "further_models":
            continue
        if sections:
            yield from _names(sections[0], f"{before}{name}.")
        else:
            yield before + name


def _is_section(kind: object) -> bool:
    return isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, BaseModel))
