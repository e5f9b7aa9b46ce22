"""Ray's JSON has a record's own fields."""

import json
import logging

from ray._common.formatters import JSONFormatter

from raylens.deployments.ray_internals.log_fields import ATTRIBUTE


def test_ray_s_json_has_a_record_s_own_fields() -> None:
    record = logging.makeLogRecord({"msg": "said", ATTRIBUTE: {"status": 500}})
    told = json.loads(JSONFormatter().format(record))
    assert (told["message"], told["status"]) == ("said", 500)
