"""`litellm`'s proxy in front of the server: the program of the `openai` package, by way of it."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from features import KEY, MODEL, URL, installed

OPENAI = Path(__file__).with_name("openai_python.py")


def wait_for(url, process):
    while process.poll() is None:
        try:
            return urlopen(url, timeout=5).close()
        except (URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise ChildProcessError("litellm has ended")


with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]
proxy_url = f"http://127.0.0.1:{port}"
model = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY}
with tempfile.TemporaryDirectory() as folder:
    configuration = Path(folder) / "config.yaml"
    configuration.write_text(json.dumps({"model_list": [{"model_name": MODEL, "litellm_params": model}]}))
    with subprocess.Popen(
        [installed("litellm"), "--config", str(configuration), "--host", "127.0.0.1", "--port", str(port)],
        stdout=sys.stderr,
        env=os.environ | {"LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ) as proxy:
        try:
            wait_for(f"{proxy_url}/health/liveliness", proxy)
            subprocess.run([sys.executable, str(OPENAI), proxy_url, *sys.argv[2:]], check=True)
        finally:
            proxy.terminate()
