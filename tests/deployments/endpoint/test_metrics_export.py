"""The pages of several nodes' exporters as one."""

from prometheus_client.parser import text_string_to_metric_families

from raylens.deployments.endpoint.metrics_export import merged_pages

PAGE = """\
# HELP raylens_mm_items_total Media items
# TYPE raylens_mm_items_total counter
raylens_mm_items_total{{modality="image",node="{node}"}} {value}
raylens_mm_items_total{{modality="video",node="{node}"}} 0.0
"""
GAUGE = """\
# HELP raylens_{name} A gauge
# TYPE raylens_{name} gauge
raylens_{name}{{node="{node}"}} 3.0
"""


def test_one_metric_holds_the_samples_of_all_nodes() -> None:
    pages = [
        PAGE.format(node="a", value=1.0) + GAUGE.format(name="x", node="a"),
        GAUGE.format(name="y", node="b") + PAGE.format(node="b", value=2.0) + GAUGE.format(name="x", node="b"),
    ]
    families = list(text_string_to_metric_families(merged_pages(pages)))
    assert [family.name for family in families] == ["raylens_mm_items", "raylens_x", "raylens_y"]
    items = {(one.labels["node"], one.labels["modality"]): one.value for one in families[0].samples}
    assert items == {("a", "image"): 1.0, ("a", "video"): 0.0, ("b", "image"): 2.0, ("b", "video"): 0.0}
    assert [len(family.samples) for family in families[1:]] == [2, 1]


def test_the_page_of_one_node_stays_as_it_is() -> None:
    page = PAGE.format(node="a", value=1.0)
    assert merged_pages([page]) == page


def test_no_node_has_an_empty_page() -> None:
    assert merged_pages([]) == ""
