"""The next limits of a large fleet: single processes, and limits per node or replica."""

import math
from dataclasses import dataclass

from pydantic import Field

from raylens.planning.costs import Costs
from raylens.planning.load import LoadProfile, Picture
from raylens.planning.plan import Plan
from raylens.planning.settings import PlanSettings

_BY_INGRESSES = "ingress.max_replicas, one per node"


class Hardware(PlanSettings):
    """Cluster figures that no benchmark measures. Each field is an option of `raylens plan`."""

    gpus_per_node: int = Field(8, ge=1, description="GPUs of a node")
    network_gbit: float = Field(25.0, gt=0, description="network bandwidth of a node in each direction, 10^9 bit/s")
    proxy_connections: int = Field(8192, ge=1, description="concurrent client connections of one HAProxy")
    controller_ms: float = Field(1.0, gt=0, description="CPU ms per second of the Serve controller for each replica")

    @property
    def bytes_per_second(self) -> float:
        return self.network_gbit * 1e9 / 8


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One limit: `used` of `limit`, in `unit`, for each of `count`. `grows`: how to raise it. `basis`: whether the
    figures are measured, derived or assumed, and the option of an assumption."""

    name: str
    used: float
    limit: float
    unit: str
    count: int
    grows: str
    basis: str

    @property
    def utilisation(self) -> float:
        return self.used / self.limit


def ceilings(plan: Plan, costs: Costs, hardware: Hardware) -> list[Ceiling]:
    """Returns all ceilings of the plan's fleet, the nearest first."""
    found = [
        _controller(plan, costs, hardware),
        *_proxy(plan, costs, hardware),
        *_processes(plan, costs),
        _transfers(plan, costs, hardware),
    ]
    return sorted(found, key=lambda ceiling: ceiling.utilisation, reverse=True)


def _controller(plan: Plan, costs: Costs, hardware: Hardware) -> Ceiling:
    each, basis = costs.fleet.controller_seconds_per_replica_second, "measured at worst: all work of an idle controller"
    if each is None:
        each, basis = hardware.controller_ms / 1e3, "assumed: --controller-ms"
    used = each * sum(stage.replicas for stage in plan.stages)
    grows = "more clusters: each has one controller"
    return Ceiling("Serve controller", used, 1.0, "cores", 1, grows, basis)


def _proxy(plan: Plan, costs: Costs, hardware: Hardware) -> list[Ceiling]:
    """Connections follow from Little's law: arrivals per second times the seconds of a request."""
    fleet, load, count = costs.fleet, plan.load, plan.stage("ingress").replicas
    connections = load.requests_per_second * plan.outcome.mean_latency
    most, basis = fleet.proxy_connections, "derived by Little's law; the limit is HAProxy's setting"
    if most is None:
        most, basis = hardware.proxy_connections, "assumed: --proxy-connections"
    flow_basis = "bytes of a token and of a megapixel measured; the network is assumed: --network-gbit"
    sent = load.tokens_per_second * (fleet.proxy_bytes_per_piece or 0.0)
    received = load.picture_rate * sum(load.megapixels) * (fleet.proxy_bytes_per_megapixel or 0.0)
    flow = hardware.bytes_per_second
    return [
        Ceiling("HAProxy connections", connections / count, float(most), "connections", count, _BY_INGRESSES, basis),
        Ceiling("HAProxy bytes sent", sent / count, flow, "bytes/s", count, _BY_INGRESSES, flow_basis),
        Ceiling("HAProxy bytes received", received / count, flow, "bytes/s", count, _BY_INGRESSES, flow_basis),
    ]


def _processes(plan: Plan, costs: Costs) -> list[Ceiling]:
    work, load = costs.proxy.work, plan.load
    ingress, shared = plan.stage("ingress"), plan.stage("shared")
    proxy = load.requests_per_second * work.seconds_per_request + load.tokens_per_second * work.seconds_per_piece
    proxy += load.picture_rate * sum(map(work.of_picture, _new_pictures(load)))
    orders = load.picture_rate * len(load.megapixels) / shared.replicas
    most_orders = orders / shared.utilisation if shared.utilisation > 0 else float("inf")
    count, of_proxy = ingress.replicas, "measured: CPU time of a request and of a piece, of one token each"
    of_ingress = "measured: CPU time of a request, a picture, a message and a piece; simulated"
    of_order = "measured: CPU time of an order"
    return [
        Ceiling("HAProxy CPU", proxy / count, 1.0, "cores", count, _BY_INGRESSES, of_proxy),
        Ceiling("Ingress CPU", ingress.busy, 1.0, "cores", count, "ingress.max_replicas", of_ingress),
        Ceiling("Shared orders", orders, most_orders, "orders/s", shared.replicas, "shared.shards", of_order),
    ]


def _transfers(plan: Plan, costs: Costs, hardware: Hardware) -> Ceiling:
    """Pixels travel from Preprocess to Encode, and embeddings from Encode to Generate; in the worst case, all over the
    network."""
    model, load, pictures = costs.model, plan.load, _new_pictures(plan.load)
    nodes = max(1, math.ceil(int(plan.gpus) / hardware.gpus_per_node))
    pixels = (1 - load.repeated_share) * sum(map(model.patches, pictures)) * model.pixel_bytes_per_patch
    used = load.picture_rate * (pixels + sum(map(model.tokens, pictures)) * model.bytes_per_embedding) / nodes
    basis = "bytes derived from the model's sizes; assumed: --gpus-per-node, --network-gbit, one stage per node"
    grows = "nodes; place Encode beside Generate"
    return Ceiling("object transfers", used, hardware.bytes_per_second, "bytes/s", nodes, grows, basis)


def _new_pictures(load: LoadProfile) -> list[Picture]:
    return [Picture(size, False, 0) for size in load.megapixels]
