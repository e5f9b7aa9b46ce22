"""The resources that the replicas of an application reserve, and those that the machines lack."""

from collections import Counter
from collections.abc import Mapping, Sequence

from raylens.deployments.config import (
    AppConfig,
    EncodeConfig,
    GenerateConfig,
    IngressConfig,
    PreprocessConfig,
    SharedConfig,
)

Amounts = Mapping[str, float]
"""Of resources, by Ray's names for them."""
_ROUNDING = 1e-6


def reserved(settings: IngressConfig | SharedConfig | PreprocessConfig | EncodeConfig | GenerateConfig) -> Amounts:
    """Returns what a replica reserves; of Generate, what each of its ranks does."""
    num_gpus = settings.num_gpus if isinstance(settings, EncodeConfig | GenerateConfig) else 0.0
    amounts = {"CPU": settings.num_cpus, "GPU": num_gpus, **settings.resources}
    return {name: amount for name, amount in amounts.items() if amount}


def lacking(config: AppConfig, nodes: Sequence[Amounts], where: str) -> dict[str, str]:
    """Returns, by the name of each deployment that the nodes have no place for, what it waits for: `1 GPU, and this
    machine has none`. `nodes`: what each of them offers in all. `where`: how to call them together."""
    bundles = _bundles(config)
    wanted: Counter[str] = Counter()
    for bundle, count in bundles.values():
        for name, amount in bundle.items():
            wanted[name] += amount * count  # type: ignore[assignment]  # typeshed knows whole counts only
    missing = {
        deployment: _too_large(bundle, nodes, where) or _too_many(bundle, nodes, where, wanted)
        for deployment, (bundle, _) in bundles.items()
    }
    return {deployment: text for deployment, text in missing.items() if text is not None}


def _bundles(config: AppConfig) -> dict[str, tuple[Amounts, int]]:
    """Returns for each deployment what one of its processes reserves, and how many processes it has at rest."""
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
    """Returns what no single node has for one process."""
    for name, amount in bundle.items():
        most = max(node.get(name, 0.0) for node in nodes)
        if amount > most + _ROUNDING:
            owner = where if len(nodes) == 1 or not most else "no node"
            return f"{amount:g} {name}, and {owner} has {_offer(most, len(nodes))}"
    if not any(all(amount <= node.get(name, 0.0) + _ROUNDING for name, amount in bundle.items()) for node in nodes):
        return f"{' and '.join(f'{amount:g} {name}' for name, amount in bundle.items())} on one node"
    return None


def _offer(most: float, num_nodes: int) -> str:
    if not most:
        return "none"
    return f"{most:g}" if num_nodes == 1 else f"more than {most:g}"


def _too_many(bundle: Amounts, nodes: Sequence[Amounts], where: str, wanted: Mapping[str, float]) -> str | None:
    """Returns what all nodes together lack for all processes."""
    for name, amount in bundle.items():
        total = sum(node.get(name, 0.0) for node in nodes)
        if wanted[name] > total + _ROUNDING:
            return f"{amount:g} {name}, and {where} has {total:g} of the {wanted[name]:g} that all stages take"
    return None
