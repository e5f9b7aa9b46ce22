"""`litellm`'s proxy in front of the server: the program of the `openai` package, by way of it."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from features import KEY, MODEL, URL, serving

OPENAI = Path(__file__).with_name("openai_python.py")

model = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY}
with tempfile.TemporaryDirectory() as folder:
    configuration = Path(folder) / "config.yaml"
    configuration.write_text(json.dumps({"model_list": [{"model_name": MODEL, "litellm_params": model}]}))
    variables = {"LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with serving("litellm", "--config", str(configuration), path="/health/liveliness", **variables) as proxy_url:
        subprocess.run([sys.executable, str(OPENAI), proxy_url, *sys.argv[2:]], check=True)
