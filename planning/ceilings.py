"""The next limits of a large fleet: parts that do not scale with the number of GPUs, and parts with a limit each."""

from dataclasses import dataclass

from pydantic import Field

from raylens.planning.costs import Costs
from raylens.planning.load import Picture
from raylens.planning.plan import Plan
from raylens.planning.settings import PlanSettings

_BY_INGRESSES = "ingress.max_replicas, one per node"


class Hardware(PlanSettings):
    """Cluster figures that no benchmark measures. Each field is an option of `raylens plan`."""

    gpus_per_node: int = Field(8, ge=1, description="GPUs of a node")
    network_gbit: float = Field(25.0, gt=0, description="10^9 bits per second that a node sends, and that it receives")
    proxy_connections: int = Field(8192, ge=1, description="connections of clients that one HAProxy serves at once")
    controller_ms: float = Field(
        1.0, gt=0, description="ms of the Serve controller's core each second, for health and metrics of a replica"
    )

    @property
    def bytes_per_second(self) -> float:
        return self.network_gbit * 1e9 / 8


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One limit: `used` of `limit`, in `unit`, for each of `count`. `grows`: how to raise it, or that this is
    impossible. `basis`: whether the figures are measured, derived or assumed, and the option of an assumption."""

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
    measured = costs.fleet.controller_seconds_per_replica_second
    each = hardware.controller_ms / 1e3 if measured is None else measured
    used = each * sum(stage.replicas for stage in plan.stages)
    grows = "no: a cluster has one; divide the fleet into clusters"
    basis = "assumed: --controller-ms" if measured is None else "measured at worst: all that an idle one does"
    return Ceiling("Serve controller", used, 1.0, "cores", 1, grows, basis)


def _proxy(plan: Plan, costs: Costs, hardware: Hardware) -> list[Ceiling]:
    """Connections follow from Little's law: arrivals per second times the seconds of a request."""
    fleet, load, count = costs.fleet, plan.load, plan.stage("ingress").replicas
    connections = load.requests_per_second * plan.outcome.mean_latency
    most = float(fleet.proxy_connections or hardware.proxy_connections)
    is_known = fleet.proxy_connections is not None
    limit_basis = (
        "derived by Little's law; the limit is HAProxy's setting" if is_known else "assumed: --proxy-connections"
    )
    flow_basis = "bytes of a token and of a megapixel measured; the network is assumed: --network-gbit"
    sent = load.tokens_per_second * (fleet.proxy_bytes_per_piece or 0.0)
    received = load.picture_rate * sum(load.megapixels) * (fleet.proxy_bytes_per_megapixel or 0.0)
    flow = hardware.bytes_per_second
    return [
        Ceiling("HAProxy connections", connections / count, most, "connections", count, _BY_INGRESSES, limit_basis),
        Ceiling("HAProxy bytes sent", sent / count, flow, "bytes/s", count, _BY_INGRESSES, flow_basis),
        Ceiling("HAProxy bytes received", received / count, flow, "bytes/s", count, _BY_INGRESSES, flow_basis),
    ]


def _processes(plan: Plan, costs: Costs) -> list[Ceiling]:
    work, load = costs.proxy.work, plan.load
    ingress, shared = plan.stage("ingress"), plan.stage("shared")
    proxy = load.requests_per_second * work.seconds_per_request + load.tokens_per_second * work.seconds_per_piece
    proxy += load.picture_rate * sum(work.of_picture(Picture(size, False, 0)) for size in load.megapixels)
    orders = load.picture_rate * len(load.megapixels) / shared.replicas
    most_orders = orders / shared.utilisation if shared.utilisation > 0 else float("inf")
    count, used = ingress.replicas, proxy / ingress.replicas
    of_proxy = "measured: processor time for a request and for a piece of an answer, of one token each"
    of_ingress = "measured: processor time for a request, a picture, a message and a piece; simulated"
    of_order = "measured: processor time of an order"
    return [
        Ceiling("HAProxy CPU", used, 1.0, "cores", count, _BY_INGRESSES, of_proxy),
        Ceiling("Ingress CPU", ingress.busy, 1.0, "cores", count, "ingress.max_replicas", of_ingress),
        Ceiling("Shared orders", orders, most_orders, "orders/s", shared.replicas, "shared.shards", of_order),
    ]


def _transfers(plan: Plan, costs: Costs, hardware: Hardware) -> Ceiling:
    """Pixels travel from Preprocess to Encode, and embeddings from Encode to Generate; in the worst case, all over the
    network."""
    model, load = costs.model, plan.load
    nodes = max(1, -(-int(plan.gpus) // hardware.gpus_per_node))
    sizes = [Picture(size, False, 0) for size in load.megapixels]
    pixels = (1 - load.repeated_share) * sum(model.patches(one) * model.pixel_bytes_per_patch for one in sizes)
    embeddings = sum(model.tokens(one) * model.bytes_per_embedding for one in sizes)
    used = load.picture_rate * (pixels + embeddings) / nodes
    grows = "nodes; place Encode beside Generate"
    basis = (
        "bytes derived from the model's sizes; assumed: --gpus-per-node, --network-gbit, and no two stages of a"
        " request on one node"
    )
    return Ceiling("object transfers", used, hardware.bytes_per_second, "bytes/s", nodes, grows, basis)
