"""Error codes whose series start at 0 in the metrics. An error with another code is counted, too, but Prometheus misses
its first count, because a rate needs an existing series. The tests check this list against the code."""

from itertools import product

from raylens.deployments.metrics.definitions import ADMISSION_REASONS, STAGES

_CLIENT_CODES = (
    # of HTTP
    *("body_timeout", "body_too_large", "headers_too_large", "http_404", "http_405", "invalid_content_type"),
    *("forbidden", "invalid_api_key", "deadline_exceeded", "request_too_large"),
    # of fields
    *("invalid_json", "invalid_option", "invalid_task", "invalid_text", "invalid_timeout", "invalid_token_id"),
    *("invalid_value", "not_implemented", "unknown_parameter", "model_not_found", "file_not_found"),
    *("response_not_found", "previous_response_not_found", "batch_not_found", "batch_too_large", "empty_batch"),
    # of prompts
    *("context_length_exceeded", "empty_prompt", "media_required", "no_chat_template", "no_room"),
    *("placeholder_mismatch", "too_many_items"),
    # of media
    *("empty_media", "invalid_base64", "invalid_data_url", "invalid_media_url", "media_fetch_disabled"),
    *("media_fetch_failed", "media_local_disabled", "media_not_cached", "media_too_large", "media_url_forbidden"),
    *("invalid_tensors", "item_too_large", "unsupported_modality", "unsupported_size"),
    # of pictures, videos and sounds
    *("image_too_large", "image_too_small", "invalid_image", "corrupt_video", "invalid_frames", "invalid_video"),
    *("too_many_frames", "video_too_large", "video_too_long", "video_too_short", "video_too_small"),
    *("audio_too_long", "audio_too_short", "corrupt_audio", "invalid_audio", "invalid_document"),
)
"""Errors that the client can fix, and the ingress's own."""
_STAGE_CODES = ("stage_unavailable", "StageFailedError")
_OWN_CODES = {
    "preprocess": ("plug_in_failed", "chat_template_failed"),
    "encode": ("plug_in_failed",),
    "generate": ("adapter_failed", "chat_template_failed"),
}
"""Errors of the operator's plug-ins, adapters and checkpoints."""


def known_errors() -> list[tuple[str, str]]:
    """Returns (stage, code) of each known error."""
    ingress = [*_CLIENT_CODES, *(f"overloaded_{reason}" for reason in ADMISSION_REASONS)]
    of_operators = [(stage, code) for stage, codes in _OWN_CODES.items() for code in codes]
    return [*product(["ingress"], ingress), *product(STAGES, _STAGE_CODES), *of_operators]
