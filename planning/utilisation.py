"""The least work of each stage, by the utilisation law."""

from collections.abc import Callable

from raylens.planning.costs import Costs, Work
from raylens.planning.load import LoadProfile, Picture


def least_work(costs: Costs, load: LoadProfile) -> dict[str, float]:
    """Returns the least number of busy replicas per stage, with full batches: requests per second times the seconds of
    a request (Lazowska et al., Quantitative System Performance, 1984, chapter 3). Each token counts as a piece.
    Messages cost nothing, because the tokens of many answers share one."""
    rates = {False: load.picture_rate * (1 - load.repeated_share), True: load.picture_rate * load.repeated_share}

    def each(of_picture: Callable[[Picture], float], kinds: tuple[bool, ...] = (False, True)) -> float:
        """Returns the pictures' cost per second. `kinds`: False for new pictures, True for repeated ones."""
        return sum(rates[kind] * of_picture(Picture(size, kind, 0)) for kind in kinds for size in load.megapixels)

    def new(of_picture: Callable[[Picture], float]) -> float:
        return each(of_picture, (False,))

    def passing(work: Work) -> float:
        requests = load.requests_per_second * work.seconds_per_request + each(work.of_picture)
        return requests + load.tokens_per_second * work.seconds_per_piece

    preprocess, encode, generate = costs.preprocess, costs.encode, costs.generate
    patch_seconds = encode.seconds_per_patch + encode.seconds_per_batch / encode.max_batch_patches
    token_seconds = generate.seconds_per_sequence + generate.seconds_per_step / generate.max_num_seqs
    prompt_tokens = load.requests_per_second * load.prompt_tokens + each(costs.model.tokens)
    steps = load.tokens_per_second * token_seconds + prompt_tokens * generate.seconds_per_prompt_token
    return {
        "ingress": passing(costs.ingress.work),
        "shared": each(costs.shared.work.of_picture),
        "preprocess": max(each(preprocess.work.of_picture), new(preprocess.of_item)),
        "encode": max(new(encode.work.of_picture), new(lambda one: patch_seconds * costs.model.patches(one))),
        "generate": max(steps, passing(generate.work)),
    }
