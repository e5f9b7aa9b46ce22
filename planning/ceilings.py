"""What a large fleet runs into next: parts that do not grow with the number of GPUs, or that each have a limit."""

from dataclasses import dataclass

from pydantic import Field

from raylens.planning.costs import Costs
from raylens.planning.load import Picture
from raylens.planning.plan import Plan
from raylens.planning.settings import PlanSettings


class Hardware(PlanSettings):
    """What of a cluster is not measured. Each field is an option of `raylens plan`."""

    gpus_per_node: int = Field(8, ge=1, description="GPUs of a node")
    network_gbit: float = Field(25.0, gt=0, description="10^9 bits per second that a node sends, and that it receives")
    proxy_connections: int = Field(8192, ge=1, description="connections of clients that one HAProxy serves at once")
    controller_ms: float = Field(
        1.0, gt=0, description="ms of the Serve controller's core each second, for health and metrics of a replica"
    )


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One limit. `used` of `limit`, in `unit`, for each of `count`. `basis` says where the figures are from: measured,
    derived from measured ones, or assumed, and then by which option."""

    name: str
    used: float
    limit: float
    unit: str
    count: int
    grows: str
    """How to raise it, or that nothing does."""
    basis: str

    @property
    def utilisation(self) -> float:
        return self.used / self.limit


def ceilings(plan: Plan, costs: Costs, hardware: Hardware) -> list[Ceiling]:
    """Returns all ceilings of the plan's fleet, the nearest first."""
    found = [
        _controller(plan, costs, hardware),
        _proxy_connections(plan, costs, hardware),
        *_proxy_bytes(plan, costs, hardware),
        _proxy_cpu(plan, costs),
        _ingress(plan),
        _shared(plan),
        _transfers(plan, costs, hardware),
    ]
    return sorted(found, key=lambda ceiling: ceiling.utilisation, reverse=True)


def _controller(plan: Plan, costs: Costs, hardware: Hardware) -> Ceiling:
    measured = costs.fleet.controller_seconds_per_replica_second
    each = hardware.controller_ms / 1e3 if measured is None else measured
    replicas = sum(stage.replicas for stage in plan.stages)
    return Ceiling(
        "Serve controller",
        used=each * replicas,
        limit=1.0,
        unit="cores",
        count=1,
        grows="no: a cluster has one; divide the fleet into clusters",
        basis=_basis(
            measured is None,
            "--controller-ms",
            "measured at worst: all that an idle one does",
        ),
    )


def _proxy_connections(plan: Plan, costs: Costs, hardware: Hardware) -> Ceiling:
    """Little's law: requests under way are arrivals a second times the seconds that each takes."""
    known = costs.fleet.proxy_connections
    proxies = plan.stage("ingress").replicas
    return Ceiling(
        "HAProxy connections",
        used=plan.load.requests_per_second * plan.outcome.mean_latency / proxies,
        limit=float(hardware.proxy_connections if known is None else known),
        unit="connections",
        count=proxies,
        grows="ingress.max_replicas, one per node",
        basis=_basis(known is None, "--proxy-connections", "derived by Little's law; the limit is HAProxy's setting"),
    )


def _proxy_bytes(plan: Plan, costs: Costs, hardware: Hardware) -> list[Ceiling]:
    proxies = plan.stage("ingress").replicas
    sent, received = costs.fleet.proxy_bytes_per_piece, costs.fleet.proxy_bytes_per_megapixel
    megapixels = plan.load.requests_per_second * plan.load.picture_share * sum(plan.load.megapixels)
    limit = hardware.network_gbit * 1e9 / 8
    flows = {
        "HAProxy bytes sent": plan.load.tokens_per_second * (sent or 0.0),
        "HAProxy bytes received": megapixels * (received or 0.0),
    }
    basis = "bytes of a token and of a megapixel measured; the network is assumed: --network-gbit"
    grows = "ingress.max_replicas, one per node"
    return [Ceiling(name, flow / proxies, limit, "bytes/s", proxies, grows, basis) for name, flow in flows.items()]


def _proxy_cpu(plan: Plan, costs: Costs) -> Ceiling:
    work, load = costs.proxy.work, plan.load
    proxies = plan.stage("ingress").replicas
    pictures = load.requests_per_second * load.picture_share
    sizes = [Picture(size, False, 0) for size in load.megapixels]
    seconds = load.requests_per_second * work.seconds_per_request + pictures * sum(map(work.of_picture, sizes))
    seconds += load.tokens_per_second * work.seconds_per_piece
    basis = "measured: processor time for a request and for a piece of an answer, of one token each"
    grows = "ingress.max_replicas, one per node"
    return Ceiling("HAProxy CPU", seconds / proxies, 1.0, "cores", proxies, grows, basis)


def _ingress(plan: Plan) -> Ceiling:
    ingress = plan.stage("ingress")
    basis = "measured: processor time for a request, a picture, a message and a piece; simulated"
    return Ceiling("Ingress CPU", ingress.busy, 1.0, "cores", ingress.replicas, "ingress.max_replicas", basis)


def _shared(plan: Plan) -> Ceiling:
    shared = plan.stage("shared")
    orders = plan.load.pictures_per_second / shared.replicas
    limit = orders / shared.utilisation if shared.utilisation > 0 else float("inf")
    basis = "measured: processor time of an order"
    return Ceiling("Shared orders", orders, limit, "orders/s", shared.replicas, "shared.shards", basis)


def _transfers(plan: Plan, costs: Costs, hardware: Hardware) -> Ceiling:
    """Pixels go from Preprocess to Encode, and embeddings from there to Generate, each over the network at worst."""
    model, load = costs.model, plan.load
    nodes = max(1, -(-int(plan.gpus) // hardware.gpus_per_node))
    rate = load.requests_per_second * load.picture_share
    sizes = [Picture(size, False, 0) for size in load.megapixels]
    pixels = (1 - load.repeated_share) * sum(model.patches(one) * model.pixel_bytes_per_patch for one in sizes)
    embeddings = sum(model.tokens(one) * model.bytes_per_embedding for one in sizes)
    return Ceiling(
        "object transfers",
        used=rate * (pixels + embeddings) / nodes,
        limit=hardware.network_gbit * 1e9 / 8,
        unit="bytes/s",
        count=nodes,
        grows="nodes; place Encode beside Generate",
        basis="bytes derived from the model's sizes; assumed: --gpus-per-node, --network-gbit, and no two stages of a"
        " request on one node",
    )


def _basis(is_assumed: bool, option: str, measured: str) -> str:
    return f"assumed: {option}" if is_assumed else measured
