"""The bounds of sampling parameters, for both the endpoint's fields and `SamplingParams`."""

from annotated_types import Interval

TEMPERATURE = Interval(ge=0, le=2)
TOP_P = Interval(gt=0, le=1)
TOP_K = Interval(ge=-1)
MIN_P = Interval(ge=0, le=1)
REPETITION_PENALTY = Interval(ge=0.01, le=100)  # beyond these bounds float32 logits become infinite
PENALTY = Interval(ge=-2, le=2)
LOGIT_BIAS = Interval(ge=-100, le=100)
NUM_TOKENS = Interval(ge=0)
NUM_LOGPROBS = Interval(ge=0, le=20)
MAX_PATTERN_SIZE = 1024
MAX_PATTERN_COUNT = 1024
MAX_N = 128
NUM_ANSWERS = Interval(ge=1, le=MAX_N)
NGRAM_SIZE = Interval(ge=0, le=1024)
SEED = Interval(ge=-(2**63), le=2**63 - 1)
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 256
