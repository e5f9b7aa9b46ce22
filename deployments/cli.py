"""The command line: `raylens serve`, `raylens demo` and `raylens key`."""

import argparse
import json
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from deployments.api_keys import ApiKeysError, add_key, read_keys
from deployments.config import SERVED_FAMILIES, AppConfig
from deployments.demo import PICTURES, run_demo
from deployments.local_cluster import free_port, running_app

BUNDLED_MODEL = Path(__file__).parent.parent / "checkpoints" / "shapes"

_SERVE_HELP = """\
Serve a vision-language model on this machine: preprocessing, vision encoding and decoding as separate processes
behind one OpenAI-compatible endpoint. Stop it with Ctrl-C.

  raylens serve                                     the bundled model, which knows coloured shapes only
  raylens serve --model ~/models/llava-1.5-7b-hf    a folder in Hugging Face format
  raylens serve --model llava-hf/llava-1.5-7b-hf    a hub id
  raylens serve --config serve.yaml                 every setting, each explained in that file

On a cluster: `ray up cluster.yaml`, then `serve deploy serve.yaml` on its head node.
"""
_KEY_HELP = """\
Make an API key. The key itself is printed once, to be given to whoever is to use it, and kept nowhere; its hash goes
into a file, which a server reads that has it as `auth.keys_file` in its settings, within seconds, while it serves.

  raylens key alice --file keys.yaml

To take a key back, delete its entry. For a server of your own, RAYLENS_API_KEYS=key1,key2 in its environment does, too.
"""
_DEMO_HELP = """\
Start the bundled model on a free port, ask it about the bundled pictures, show each answer as it streams and how
long each stage took, and stop. Exits 1 when an answer is wrong.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, 1 when it failed, 2 for a wrong argument."""
    args = _parser().parse_args(argv)
    _stop_on_sigterm()
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        return 0
    except (ConfigError, RuntimeError) as error:
        print(f"raylens: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return status


class ConfigError(ValueError):
    """A setting or argument that cannot work; the message names it."""


def load_config(path: Path | None, model: str | None) -> AppConfig:
    """The settings of a Serve config file (`args` of its only application), with `model` in place of its model.

    Raises ConfigError that names the file and the field.
    """
    settings: dict[str, Any] = {}
    if path is not None:
        settings = _read_settings(path)
    if model is not None:
        settings["model"] = model
    settings.setdefault("model", str(BUNDLED_MODEL))
    try:
        config = AppConfig.model_validate(settings)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"{path or 'settings'}: {problems}") from error
    config = _with_local_root(_with_keys(config))
    folder = Path(config.model).expanduser()
    if not folder.exists():
        _check_hub_id(config.model)
        return config
    _check_folder(folder)
    # Replicas do not start where the command line was typed.
    return config.model_copy(update={"model": str(folder.resolve())})


def _with_keys(config: AppConfig) -> AppConfig:
    """The file of keys checked, and under a name that holds where replicas start."""
    if config.auth.keys_file is None:
        return config
    file = Path(config.auth.keys_file).expanduser().resolve()
    try:
        read_keys(file)
    except ApiKeysError as error:
        raise ConfigError(f"auth.keys_file: {error}") from error
    return config.model_copy(update={"auth": config.auth.model_copy(update={"keys_file": str(file)})})


def _with_local_root(config: AppConfig) -> AppConfig:
    """The same for the folder of media."""
    if config.media.local_root is None:
        return config
    folder = Path(config.media.local_root).expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(f"media.local_root: {folder} is no folder")
    return config.model_copy(update={"media": config.media.model_copy(update={"local_root": str(folder)})})


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text())
        (application,) = document["applications"]
        return dict(application.get("args") or {})
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--config {path}: not a Serve config file with one application") from error


def _check_hub_id(model: str) -> None:
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ConfigError(f"--model {model}: no such folder, and not a hub id (owner/name)")


def _check_folder(folder: Path) -> None:
    """Refuses what can be seen to be wrong before anything is started."""
    try:
        model_type = json.loads((folder / "config.json").read_text())["model_type"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--model {folder}: no readable config.json with a model_type in it") from error
    if model_type not in SERVED_FAMILIES:
        raise ConfigError(
            f"--model {folder}: model_type {model_type!r} is not supported, only {sorted(SERVED_FAMILIES)}"
        )


def _stop_on_sigterm() -> None:
    """Makes `kill` shut down as cleanly as Ctrl-C, also where that itself is ignored: shells start what runs in the
    background so."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)


def _serve(args: argparse.Namespace) -> int:
    config = load_config(args.config, args.model)
    port = args.port or free_port()
    with running_app(config, host=args.host, port=port, dashboard=args.dashboard) as url:
        _stop_on_sigterm()  # Ray has put a handler of its own in its place
        print(f"\n{config.model_name} is ready at {url}/v1  (health: {url}/health, metrics: {url}/metrics)\n")
        print("Try:\n")
        print(_curl_line(url, config.model_name), flush=True)
        threading.Event().wait()
    return 0


def _curl_line(url: str, model: str) -> str:
    picture = PICTURES / "one.png"
    body = (
        f'{{"model":"{model}","messages":[{{"role":"user","content":['
        f'{{"type":"image_url","image_url":{{"url":"data:image/png;base64,\'"$(base64 -w0 {picture})"\'"}}}},'
        '{"type":"text","text":"Describe the picture."}]}]}'
    )
    return f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"


def _key(args: argparse.Namespace) -> int:
    try:
        print(add_key(args.file, args.name))
    except ApiKeysError as error:
        raise ConfigError(str(error)) from error
    return 0


def _demo(args: argparse.Namespace) -> int:
    config = load_config(None, None)
    with running_app(config, host="127.0.0.1", port=free_port()) as url:
        return run_demo(url, config.model_name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="raylens", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    style = argparse.RawDescriptionHelpFormatter
    serve = commands.add_parser("serve", help="serve a model", description=_SERVE_HELP, formatter_class=style)
    serve.add_argument("--model", help="folder or hub id; goes before the config file's (default: checkpoints/shapes)")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    serve.add_argument("--port", type=_port, default=8000, help="port to listen on, 0 for a free one (default: 8000)")
    serve.add_argument("--config", type=Path, metavar="FILE", help="Serve config file, e.g. serve.yaml")
    serve.add_argument("--dashboard", action="store_true", help="start Ray's dashboard too, on port 8265")
    serve.set_defaults(run=_serve)
    demo = commands.add_parser("demo", help="see it work", description=_DEMO_HELP, formatter_class=style)
    demo.set_defaults(run=_demo)
    key = commands.add_parser("key", help="make an API key", description=_KEY_HELP, formatter_class=style)
    key.add_argument("name", help="whose key it is: letters, digits, '.', '_', '-'")
    key.add_argument("--file", type=Path, required=True, help="YAML file that its hash is added to, made if missing")
    key.set_defaults(run=_key)
    return parser


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port < 65536:
        raise argparse.ArgumentTypeError(f"{port} is not between 0 and 65535")
    return port
