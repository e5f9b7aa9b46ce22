"""The pages of several nodes' agents as one."""

from prometheus_client.parser import text_string_to_metric_families

from deployments.endpoint.metrics_export import merge_pages, render_page

NODE = """\
# HELP ray_raylens_mm_items_total Media items
# TYPE ray_raylens_mm_items_total counter
ray_raylens_mm_items_total{{modality="image",node="{node}"}} {value}
# HELP ray_other Something of Ray's own
# TYPE ray_other gauge
ray_other{{name="ray_raylens_x"}} 1.0
"""


def test_one_family_holds_the_samples_of_all_nodes() -> None:
    (family,) = merge_pages([NODE.format(node="a", value=1.0), NODE.format(node="b", value=2.0), ""])
    assert family.name == "raylens_mm_items"
    assert {sample.labels["node"]: sample.value for sample in family.samples} == {"a": 1.0, "b": 2.0}


def test_the_page_reads_back() -> None:
    page = render_page(merge_pages([NODE.format(node="a", value=1.0)])).decode()
    (family,) = text_string_to_metric_families(page)
    assert (family.name, family.type, family.documentation) == ("raylens_mm_items", "counter", "Media items")
    assert [(sample.name, sample.value) for sample in family.samples] == [("raylens_mm_items_total", 1.0)]
