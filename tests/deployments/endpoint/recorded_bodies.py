"""Bodies of requests as well-known clients send them: recorded from openai-agents 0.24, litellm 1.83 and guidellm 0.8,
with the texts shortened."""

from typing import Any

import httpx

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"

_PARAMETERS: dict[str, Any] = {
    "properties": {"city": {"title": "City", "type": "string"}},
    "required": ["city"],
    "title": "weather_args",
    "type": "object",
    "additionalProperties": False,
}
_AGENT = {
    "model": "shapes",
    "include": [],
    "input": [{"content": "Hello", "role": "user"}],
    "instructions": "Be short.",
    "tools": [],
}
_AGENT_TOOL = {
    "name": "weather",
    "parameters": _PARAMETERS,
    "strict": True,
    "type": "function",
    "description": "The weather of a city.",
}
_USAGE = {"include_usage": True, "continuous_usage_stats": True}
_ADAPTER = {
    "model": "shapes",
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
    "max_output_tokens": 20,
}
_ADAPTER_TOOL = {
    "type": "function",
    "name": "weather",
    "description": "w",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}

PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "openai-agents": (RESPONSES, _AGENT),
    "openai-agents, streaming": (RESPONSES, {**_AGENT, "stream": True}),
    "openai-agents, with settings": (
        RESPONSES,
        {
            **_AGENT,
            "include": ["reasoning.encrypted_content"],
            "max_output_tokens": 30,
            "metadata": {"a": "b"},
            "prompt_cache_retention": "24h",
            "reasoning": {"effort": "low"},
            "store": False,
            "temperature": 0.2,
            "text": {"verbosity": "low"},
            "truncation": "auto",
        },
    ),
    "openai-agents, chat": (
        CHAT,
        {
            "model": "shapes",
            "stream": True,
            "messages": [{"content": "Be short.", "role": "system"}, {"role": "user", "content": "Hello"}],
        },
    ),
    "guidellm, chat": (
        CHAT,
        {
            "model": "shapes",
            "stream": True,
            "stream_options": _USAGE,
            "max_completion_tokens": 8,
            "stop": None,
            "ignore_eos": True,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        },
    ),
    "guidellm, completions": (
        COMPLETIONS,
        {
            "model": "shapes",
            "stream": True,
            "stream_options": _USAGE,
            "max_tokens": 8,
            "stop": None,
            "ignore_eos": True,
            "prompt": "Hello",
        },
    ),
    "litellm, chat": (CHAT, {"model": "shapes", "messages": [{"role": "user", "content": "Hello"}]}),
    "litellm, chat with effort": (
        CHAT,
        {"model": "shapes", "messages": [{"role": "user", "content": "Hello"}], "reasoning_effort": "low"},
    ),
    "litellm, Anthropic's messages": (RESPONSES, _ADAPTER),
    "litellm, Anthropic's messages with thinking": (RESPONSES, {**_ADAPTER, "reasoning": {"effort": "minimal"}}),
}
"""By client; for a model without tools."""

WITH_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai-agents": (RESPONSES, {**_AGENT, "tools": [_AGENT_TOOL]}),
    "openai-agents, streaming": (RESPONSES, {**_AGENT, "stream": True, "tools": [_AGENT_TOOL]}),
    "litellm, chat": (
        CHAT,
        {
            "model": "shapes",
            "stream": True,
            "messages": [{"role": "user", "content": "Hello"}],
            "stream_options": {"include_usage": True},
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": _PARAMETERS}}],
            "top_k": -1,
        },
    ),
    "litellm, Anthropic's messages": (
        RESPONSES,
        {**_ADAPTER, "instructions": "Be short.", "tools": [_ADAPTER_TOOL]},
    ),
    "litellm, Anthropic's messages with a call before": (
        RESPONSES,
        {
            **_ADAPTER,
            "input": [
                *_ADAPTER["input"],  # type: ignore[misc]
                {"type": "function_call", "call_id": "toolu_1", "name": "weather", "arguments": '{"city": "Rome"}'},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
                {"type": "function_call_output", "call_id": "toolu_1", "output": "sunny"},
            ],
            "temperature": 0.5,
            "tools": [_ADAPTER_TOOL],
            "user": "me",
        },
    ),
}


def assert_is_answered(app_url: str, path: str, body: dict[str, Any]) -> None:
    """With all of its fields known, in the form that it asks for, and without an error on the way."""
    answer = httpx.post(app_url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert "x-raylens-ignored-fields" not in answer.headers
    assert answer.headers["content-type"].startswith("text/event-stream" if body.get("stream") else "application/json")
    assert "error" not in answer.text.replace('"error":null', "")
