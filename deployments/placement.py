"""The resources that an application's replicas reserve, and the resources that the machines lack."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from raylens.deployments.config import AppConfig, EncodeConfig, GenerateConfig, ProcessConfig

Amounts = Mapping[str, float]  # by Ray's resource names
_ROUNDING = 1e-6


def reserved(settings: ProcessConfig) -> Amounts:
    """Returns the resources of one replica; for Generate, of one rank."""
    num_gpus = settings.num_gpus if isinstance(settings, EncodeConfig | GenerateConfig) else 0.0
    amounts = {"CPU": settings.num_cpus, "GPU": num_gpus, **settings.resources}
    return {name: amount for name, amount in amounts.items() if amount}


def lacking(config: AppConfig, nodes: Sequence[Amounts], where: str) -> dict[str, str]:
    """Returns, per deployment without a place on the nodes, the reason, such as `1 GPU, and this machine has none`.
    `nodes`: each node's total resources. `where`: the name of all nodes together."""
    bundles = _bundles(config)
    wanted: defaultdict[str, float] = defaultdict(float)
    for bundle, count in bundles.values():
        for name, amount in bundle.items():
            wanted[name] += amount * count
    missing = {
        deployment: _too_large(bundle, nodes, where) or _too_many(bundle, nodes, where, wanted)
        for deployment, (bundle, _) in bundles.items()
    }
    return {deployment: text for deployment, text in missing.items() if text is not None}


def _bundles(config: AppConfig) -> dict[str, tuple[Amounts, int]]:
    """Returns per deployment the resources of one process, and the number of processes at rest."""
    shared = {f"Shared-{number}": (reserved(config.shared), 1) for number in range(config.shared.shards)}
    bundles = {"Ingress": (reserved(config.ingress), config.ingress.min_replicas), **shared}
    for suffix, own in config.by_suffix().items():
        generate = own.generate
        bundles[f"Preprocess{suffix}"] = reserved(own.preprocess), own.preprocess.min_replicas
        bundles[f"Generate{suffix}"] = reserved(generate), generate.min_replicas * generate.tensor_parallel_size
        if own.encode.placement != "inline":
            bundles[f"Encode{suffix}"] = reserved(own.encode), own.encode.min_replicas
    return bundles


def _too_large(bundle: Amounts, nodes: Sequence[Amounts], where: str) -> str | None:
    """Returns the resources of one process that no single node has."""
    for name, amount in bundle.items():
        most = max(node.get(name, 0.0) for node in nodes)
        if amount > most + _ROUNDING:
            if not most:
                return f"{amount:g} {name}, and {where} has none"
            offer = f"{where} has" if len(nodes) == 1 else "no node has more than"
            return f"{amount:g} {name}, and {offer} {most:g}"
    if not any(all(amount <= node.get(name, 0.0) + _ROUNDING for name, amount in bundle.items()) for node in nodes):
        return f"{' and '.join(f'{amount:g} {name}' for name, amount in bundle.items())} on one node"
    return None


def _too_many(bundle: Amounts, nodes: Sequence[Amounts], where: str, wanted: Mapping[str, float]) -> str | None:
    """Returns the resources that all nodes together lack for all processes."""
    for name, amount in bundle.items():
        total = sum(node.get(name, 0.0) for node in nodes)
        if wanted[name] > total + _ROUNDING:
            return f"{amount:g} {name}, and {where} has {total:g} of the {wanted[name]:g} that all stages take"
    return None
