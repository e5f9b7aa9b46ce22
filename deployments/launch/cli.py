"""The command line, `raylens`: one function for each command."""

import argparse
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import shtab

import raylens
from raylens.checkpoints import PICTURES
from raylens.deployments import server_log
from raylens.deployments.batch import command as batch_command
from raylens.deployments.batch.request_file import BatchFileError
from raylens.deployments.cluster.ray_session import STOP_SIGNALS, check_ray
from raylens.deployments.cluster.server_processes import kill_orphans
from raylens.deployments.config import AppConfig
from raylens.deployments.endpoint import api_keys
from raylens.deployments.free_port import free_port
from raylens.deployments.launch import setting_flags
from raylens.deployments.launch.config_file import ConfigError, load_config
from raylens.deployments.launch.demo import run_demo
from raylens.deployments.launch.deploy import deploy
from raylens.deployments.launch.devices import DEVICES, choose_devices
from raylens.deployments.launch.local_cluster import check_address, print_at_once, running_app
from raylens.deployments.launch.node import start_node
from raylens.deployments.launch.start_page import StartPage, start_page
from raylens.deployments.operator import top_command, waterfall
from raylens.planning import command as plan_command
from raylens.planning.settings import PlanError

_HELP = "Serve vision-language models, and work with servers. `raylens COMMAND --help` explains a command."
_SERVE_HELP = """\
Serve a vision-language model on this machine: preprocessing, vision encoding and decoding as separate processes
behind one OpenAI-compatible endpoint. Stop it with Ctrl-C.

  raylens serve                                     the bundled model, which knows coloured shapes only
  raylens serve ~/models/llava-1.5-7b-hf            a folder in Hugging Face format
  raylens serve llava-hf/llava-1.5-7b-hf            a hub id
  raylens serve ~/models/a ~/models/b               two models behind one endpoint
  raylens serve --config serve.yaml                 every setting, each explained in that file
  raylens serve --set max_model_len=16k             a setting of that file
  raylens serve --device cpu                        on the CPU, also if this machine has GPUs

With a GPU, Encode and Generate run on it: on a GPU each, or on parts of one by its memory. The first line tells the
parts. A `num_gpus` in the settings goes before that.

Standard output reports the start; standard error has a line for each request and each failure's reason.
On a cluster: `ray up cluster.yaml`, see docs/clusters.md.
"""
_KEY_HELP = """\
Make an API key. The command prints the key once and stores only its hash, in a file. A server with this file as
`auth.keys_file` in its settings accepts the key within seconds.

  raylens key alice --file keys.yaml
  raylens key operator --admin --file keys.yaml     for `raylens top`, /dashboard and Prometheus, too

To revoke a key, delete its entry. A server of your own also takes keys from its environment: with
RAYLENS_API_KEYS=key1,key2 all of them are admins.
"""
_DEMO_HELP = """\
Start the bundled model on a free port, ask it about the bundled pictures, show each answer as it streams and the time
of each stage, and stop. Exits 1 when an answer is wrong.
"""
_NODE_HELP = """\
Start Ray on this node of a cluster, with the environment that Raylens needs. All arguments go to `ray start`:

  raylens node --head --port=6379
  raylens node --address=10.0.0.1:6379

The node keeps its files in ~/.raylens. All nodes need the same token in ~/.ray/auth_token (`ray get-auth-token
--generate`). cluster.yaml and clusters/ have files for `ray up` that do all of this.
"""
_DEPLOY_HELP = """\
Deploy an application, or its new settings, to this node's Ray cluster, and wait until every stage is ready.
`ray up cluster.yaml` does this on the head node.

  raylens deploy                                    serve.yaml of this folder
  raylens deploy serve.yaml --host 0.0.0.0          for clusters: other nodes reach the endpoint, too
  raylens deploy serve.yaml --no-wait               return at once; `serve status` reports the progress

The command checks the file before it sends anything, and prints a line for each change of a stage. Old replicas serve
until new ones are ready. Exits 1 when a stage does not start, with its error, and after --timeout; the deployment
itself continues.
"""
_CONVERT_HELP = """\
Copy a checkpoint, with safetensors weights under the names that Raylens and transformers use.

  raylens convert safetensors ~/models/old ~/models/new              weights that are pickles (pytorch_model.bin)
  raylens convert wemm ~/models/WeMM-Chat-2K-CN ~/models/wemm

The command only reads SRC, and holds at most one file of weights in memory. The new folder DST gets its name once all
weights are written, read back and compared bit by bit, so a stopped conversion leaves nothing that looks finished.
"""
_COMPLETION_HELP = """\
Print a script that lets the shell complete commands, arguments and their values with the Tab key:

  eval "$(raylens completion bash)"                 this shell; in ~/.bashrc: each one
  raylens completion zsh > ~/.zfunc/_raylens        with ~/.zfunc in fpath
"""
_WAIT_SECONDS = 1800  # enough for new nodes that start and download a model
_INTERRUPTED = 130
"""The exit status of a stopped command that should have finished, as in shells. Stopping a server is not a failure."""
_CHECK_SECONDS = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, 1 when it failed, 2 for a wrong argument."""
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown and args.run is not _serve:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    _stop_on_signals()
    try:
        setting_flags.refuse_unknown(unknown)
        status: int = args.run(args)
    except KeyboardInterrupt:
        print("raylens: stopped", file=sys.stderr)
        return int(args.when_stopped)
    except (ConfigError, PlanError, BatchFileError, api_keys.ApiKeysError, RuntimeError) as error:
        print(f"raylens: {error}", file=sys.stderr)
        return 1 if isinstance(error, RuntimeError) else 2
    return status


class _Stopped(KeyboardInterrupt):
    """After a plain KeyboardInterrupt in an import, Python exits with the signal's status, even if it was caught."""


def _stop_on_signals() -> None:
    """Makes SIGTERM and SIGHUP shut down as cleanly as Ctrl-C. SIGHUP stays ignored under `nohup`."""

    def stop(*_: object) -> None:
        raise _Stopped

    for number in STOP_SIGNALS:
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)


def _serve(args: argparse.Namespace) -> int:
    flags = setting_flags.settings_of(args)
    if args.models:
        if "model" in flags:
            twice = f"{setting_flags.flag_of('model', args)} {flags['model']}"
            raise ConfigError(f"the model is named twice: {args.models[0]} and {twice}")
        if flags and len(args.models) > 1:
            flag = setting_flags.flag_of(next(iter(flags)), args)
            raise ConfigError(f"{flag} concerns one model: settings of several go into a file (--config)")
        flags["model"], *further = args.models
        if further:
            flags["further_models"] = [{"model": model} for model in further]
    _check_device(args, flags)
    config = load_config(args.config, flags, flag_of=lambda setting: setting_flags.flag_of(setting, args))
    config, devices = choose_devices(config, device=args.device, num_gpus=args.num_gpus)
    if args.api_key:
        os.environ[api_keys.ENVIRONMENT_VARIABLE] = ",".join(args.api_key)
    port = args.port or free_port()
    kill_orphans()  # an orphan may hold the port
    host = check_address(args.host, port)
    print_at_once(devices)
    os.environ[server_log.LEVEL_VARIABLE] = args.log_level
    os.environ[server_log.FORMAT_VARIABLE] = args.log_format
    with ExitStack() as starting:
        start = starting.enter_context(start_page(config, host, port))
        say = partial(_say, start)
        log = start.reading(sys.stderr)
        with running_app(config, host=host, port=port, dashboard=args.dashboard, say=say, log=log) as url:
            starting.close()
            _tell_ready(config, url, args.api_key[0] if args.api_key else None)
            while True:
                check_ray()
                time.sleep(_CHECK_SECONDS)


def _say(start: StartPage, line: str) -> None:
    print_at_once(line)
    start.say(line)


def _tell_ready(config: AppConfig, url: str, key: str | None) -> None:
    names = " and ".join(model.model_name for model in config.models)
    are = "are" if config.further_models else "is"
    print(f"\n{names} {are} ready at {url}/v1  (health: {url}/health, dashboard: {url}/dashboard)\n\nTry:\n")
    print(_curl_line(url, config.model_name, key), flush=True)


def _check_device(args: argparse.Namespace, flags: Mapping[str, Any]) -> None:
    if args.device == "auto":
        return
    for setting in ("encode.num_gpus", "generate.num_gpus"):
        if setting in flags:
            raise ConfigError(
                f"--device and {setting_flags.flag_of(setting, args)} both choose a device: leave one out"
            )


def _curl_line(url: str, model: str, key: str | None) -> str:
    picture = PICTURES / "one.png"
    body = (
        f'{{"model":"{model}","messages":[{{"role":"user","content":['
        f'{{"type":"image_url","image_url":{{"url":"data:image/png;base64,\'"$(base64 -w0 {picture})"\'"}}}},'
        '{"type":"text","text":"Describe the picture."}]}]}'
    )
    access = "" if key is None else f" -H {shlex.quote(f'Authorization: Bearer {key}')}"
    return f"curl -s {url}/v1/chat/completions{access} -H 'Content-Type: application/json' -d '{body}'\n"


def _key(args: argparse.Namespace) -> int:
    print(api_keys.add_key(args.file, args.name, is_admin=args.admin))
    return 0


def _convert(args: argparse.Namespace) -> int:
    from tqdm.std import tqdm

    from raylens.modeling.checkpoint_conversion import MODEL_RENAMINGS, ConversionError, convert_checkpoint
    from raylens.modeling.load_progress import told_progress

    has_bar = sys.stderr.isatty()
    say = tqdm.write if has_bar else print_at_once  # `write` keeps the bar below the lines
    try:
        with nullcontext() if has_bar else told_progress(partial(print, file=sys.stderr, flush=True)):
            convert_checkpoint(args.source, args.target, MODEL_RENAMINGS[args.model], say=say)
    except ConversionError as error:
        raise ConfigError(str(error)) from error
    return 0


def _node(args: argparse.Namespace) -> int:
    if args.arguments in ([], ["--help"], ["-h"]):
        print(f"usage: raylens node ARGUMENT ...\n\n{_NODE_HELP}", end="")
        return 0 if args.arguments else 2
    return start_node(args.arguments)


def _deploy(args: argparse.Namespace) -> int:
    deploy(args.file, host=args.host, timeout_s=None if args.no_wait else args.timeout)
    return 0


def _demo(args: argparse.Namespace) -> int:
    config = load_config(None, {})
    with running_app(config, host="127.0.0.1", port=free_port()) as url:
        return run_demo(url, config.model_name)


def _completion(args: argparse.Namespace) -> int:
    print(shtab.complete(_parser(), shell=args.shell))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="raylens", description=_HELP)
    parser.add_argument("--version", action="version", version=f"raylens {raylens.__version__}")
    parser.set_defaults(when_stopped=0)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, summary: str, description: str, run: Any, **defaults: Any) -> argparse.ArgumentParser:
        style = argparse.RawDescriptionHelpFormatter
        added = commands.add_parser(name, help=summary, description=description, formatter_class=style)
        added.set_defaults(run=run, **defaults)
        return added

    _add_serve_arguments(command("serve", "serve a model", _SERVE_HELP, _serve))
    command("demo", "see it work", _DEMO_HELP, _demo)
    batching = command(
        "batch", "answer a file of requests", batch_command.HELP, batch_command.run, when_stopped=_INTERRUPTED
    )
    batch_command.add_arguments(batching)
    top = command("top", "watch a server", top_command.HELP, top_command.run, when_stopped=_INTERRUPTED)
    top_command.add_arguments(top)
    waterfall.add_arguments(command("trace", "show a request's stage times", waterfall.HELP, waterfall.run))
    plan_command.add_arguments(command("plan", "size a server for a load", plan_command.HELP, plan_command.run))
    node = commands.add_parser("node", help="start Ray on a node of a cluster", prefix_chars="+", add_help=False)
    node.add_argument("arguments", nargs=argparse.REMAINDER)
    node.set_defaults(run=_node)
    deploying = command("deploy", "bring settings to a cluster", _DEPLOY_HELP, _deploy, when_stopped=_INTERRUPTED)
    _add_deploy_arguments(deploying)
    key = command("key", "make an API key", _KEY_HELP, _key)
    key.add_argument("name", help="the key's owner: letters, digits, '.', '_', '-'")
    key.add_argument("--file", type=Path, required=True, help="YAML file for its hash, created if missing")
    key.add_argument("--admin", action="store_true", help="may read /metrics and /dashboard, which name other keys")
    convert = command("convert", "copy a checkpoint as safetensors", _CONVERT_HELP, _convert)
    convert.add_argument("model", choices=["wemm", "safetensors"], help="safetensors: a model of any kind")
    convert.add_argument("source", type=Path, metavar="SRC", help="folder of the checkpoint")
    convert.add_argument("target", type=Path, metavar="DST", help="new folder of the copy")
    completion = command("completion", "let the shell complete commands", _COMPLETION_HELP, _completion)
    completion.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    return parser


def _add_serve_arguments(serve: argparse.ArgumentParser) -> None:
    add: Any = serve.add_argument
    models_help = "folders or hub ids of models (default: the bundled model)"
    add("models", nargs="*", metavar="MODEL", help=models_help).complete = shtab.DIRECTORY
    config_help = "Serve config file, e.g. serve.yaml; flags override it"
    add("--config", type=Path, metavar="FILE", help=config_help).complete = shtab.FILE
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=_port, default=8000, help="port to listen on, 0 for a free one (default: 8000)")
    key_help = "key for clients, repeatable; for trials: the list of processes shows it (else see `raylens key`)"
    add("--api-key", action="append", metavar="KEY", help=key_help)
    add("--log-level", choices=server_log.LEVELS, default="info", help="least level on the console (default: info)")
    format_help = "json: an object per line, with request and trace ids (default: text)"
    add("--log-format", choices=server_log.FORMATS, default=server_log.TEXT, help=format_help)
    add("--dashboard", action="store_true", help="start Ray's dashboard too, on port 8265")
    device_help = "auto: the GPUs, if there are some (default); cpu; cuda: fails without a GPU"
    add("--device", choices=DEVICES, default="auto", help=device_help)
    add("--num-gpus", type=_num_gpus, metavar="N", help="most GPUs of this machine to use (default: all)")
    setting_flags.add_arguments(serve)


def _add_deploy_arguments(deploying: argparse.ArgumentParser) -> None:
    add: Any = deploying.add_argument
    default = Path("serve.yaml")
    file_help = "Serve config file (default: %(default)s)"
    add("file", nargs="?", type=Path, metavar="FILE", default=default, help=file_help).complete = shtab.FILE
    add("--host", help="address to listen on, instead of the file's http_options.host")
    add("--timeout", type=_seconds, metavar="SECONDS", default=_WAIT_SECONDS, help="longest wait (default: 1800)")
    add("--no-wait", action="store_true", help="do not wait")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds


def _num_gpus(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above 0; --device cpu takes no GPU")
    return number


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port < 65536:
        raise argparse.ArgumentTypeError(f"{port} is not between 0 and 65535")
    return port
